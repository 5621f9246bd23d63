"""Calls of /generate to an embedded server over one WebSocket, in the place of an HTTP request for each.

    generate --> outgoing --> writer task --> server --> reader task --> the future that generate awaits

Calls that begin at the same time travel in one message, and so do results. See arl.engine.frames for what they hold.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import aiohttp
import numpy as np

from arl.api.images import PlacedImage
from arl.engine.frames import (
    GONE,
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    PATH,
    BrokenFrameError,
    Call,
    Cancel,
    FramedImage,
    Result,
    messages_of,
    results_of,
)
from arl.runtime.http.client import NotConnectedError

_MOST_DIGESTS = 1 << 16
_HEARTBEAT_S = 30.0
"""A connection that is dropped silently is noticed after this time and half of it."""


class _Socket(aiohttp.ClientWebSocketResponse):
    def let_go(self) -> None:
        """Close the connection at once, without a farewell to the server, however `receive` has ended.

        After an end that is an error, `close` would leave it for the garbage collector, which warns.
        """
        self._response.close()


class FrameClient:
    """One connection, made by `opened`. `run` sends and reads until it ends; then `is_open` is False for ever."""

    def __init__(self, session: aiohttp.ClientSession, connection: _Socket) -> None:
        self.is_open = True
        self._session = session
        self._socket = connection
        self._last_number = 0
        self._outgoing: list[bytes] = []
        self._has_outgoing = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._had: set[bytes] = set()
        self._is_blamed = False

    @classmethod
    async def opened(cls, url: str, api_key: str | None, timeout_s: float) -> FrameClient | None:
        """Connect; None if the server refuses, or something before it stalls. Raises OSError if it is not reached."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), headers=headers, ws_response_class=_Socket)
        try:
            async with asyncio.timeout(timeout_s):
                opening = session.ws_connect(url + PATH, heartbeat=_HEARTBEAT_S, max_msg_size=MAX_MESSAGE_BYTES)
                return cls(session, cast("_Socket", await opening))
        except (aiohttp.WSServerHandshakeError, TimeoutError):
            await session.close()
            return None
        except (aiohttp.ClientError, OSError) as error:
            await session.close()
            raise ConnectionError(str(error) or "no answer") from error
        except BaseException:
            await session.close()
            raise

    async def run(self) -> None:
        """Send calls and read results until the connection ends, or `aclose`."""
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write())
                await self._read()
                writing.cancel()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        self.is_open = False
        for answer in self._waiting.values():
            if not answer.done():  # else its caller was cancelled, and has yet to run
                answer.set_exception(ConnectionError("the connection was closed"))
        self._waiting.clear()
        if (sock := self._socket.get_extra_info("socket")) is not None:
            with suppress(OSError):  # it is not connected any more
                sock.shutdown(socket.SHUT_RDWR)  # else it would wait until the server has read what was sent
        self._socket.let_go()
        await self._session.close()

    def takes_blame(self) -> bool:
        """True for the first call that it has failed, and False for the others: its end is one fault."""
        is_blamed, self._is_blamed = self._is_blamed, True
        return not is_blamed

    def fits(self, rid: str, num_tokens: int, num_image_bytes: int = 0) -> bool:
        """Whether a call of this name, with a prompt of so many tokens, can be sent. Over HTTP every call can."""
        try:
            is_name = len(rid.encode()) <= MAX_NAME_BYTES
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold
            return False
        return self.is_open and is_name and 8 * num_tokens + num_image_bytes < MAX_MESSAGE_BYTES

    async def generate(
        self, rid: str, prompt: np.ndarray, settings: bytes, images: Sequence[PlacedImage] = ()
    ) -> Result:
        """The server's answer. Cancellation aborts the request. Raises ConnectionError when the connection ends."""
        call = Call(number=0, rid=rid, settings=settings, ids=prompt, images=self._framed(images))
        result = await self._ask(call)
        if result.status == GONE:
            self._had.clear()
            call.images = self._framed(images)
            result = await self._ask(call)
        return result

    def _framed(self, images: Sequence[PlacedImage]) -> tuple[FramedImage, ...]:
        """The images, with the files of those that the server has not had."""
        framed: list[FramedImage] = []
        for placed in images:
            digest = bytes.fromhex(placed.image.digest)
            data = b"" if digest in self._had else placed.image.data
            self._had.add(digest)
            framed.append(FramedImage(digest=digest, start=placed.start, stop=placed.stop, data=data))
        if len(self._had) > _MOST_DIGESTS:
            self._had.clear()
        return tuple(framed)

    async def _ask(self, call: Call) -> Result:
        if not self.is_open:
            raise NotConnectedError("the connection was closed")
        self._last_number += 1
        number = call.number = self._last_number
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send(call.encode())
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():  # else its end came in the same moment
                self._send(Cancel(number).encode())
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        self._has_outgoing.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                frames, self._outgoing = self._outgoing, []
                for message in messages_of(frames):
                    await self._socket.send_bytes(message)
        except (aiohttp.ClientError, OSError):
            await self._socket.close()  # the reader ends

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            try:
                for result in results_of(message.data):
                    answer = self._waiting.pop(result.number, None)
                    if answer is not None and not answer.done():
                        answer.set_result(result)
            except BrokenFrameError:
                return
