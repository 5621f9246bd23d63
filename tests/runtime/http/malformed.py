"""Malformed requests from a seed: bytes as a socket gets them, made from sound requests by one to three changes."""

import gzip
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_DEEP = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """A request that a server answers."""

    method: str
    path: str
    body: Any = None
    """JSON."""
    framed: Callable[[bytes], bytes] = bytes
    """Puts the JSON into the bytes that the server takes."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_bytes(self) -> bytes:
        body = b"" if self.body is None else json.dumps(self.body).encode()
        return self.around(body).to_bytes()

    def around(self, body: bytes) -> "Raw":
        framed = self.framed(body)
        headers = {"Host": "a", "Connection": "close", **self.headers}
        encoded = tuple((name.encode(), value.encode()) for name, value in headers.items())
        return Raw(self.method.encode(), self.path.encode(), encoded, framed)


@dataclass(frozen=True, slots=True)
class Raw:
    """A request on its way to bytes."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def to_bytes(self) -> bytes:
        names = {name for name, _ in self.headers}
        if not names & {b"Content-Length", b"Transfer-Encoding"}:
            return self.with_header(b"Content-Length", str(len(self.body)).encode()).to_bytes()
        lines = [self.method + b" " + self.path + b" HTTP/1.1", *(name + b": " + value for name, value in self.headers)]
        return b"\r\n".join([*lines, b"", self.body])

    def with_header(self, name: bytes, value: bytes) -> "Raw":
        return replace(self, headers=(*(one for one in self.headers if one[0] != name), (name, value)))


def malformed(sound: Sound, source: random.Random) -> bytes:
    """The bytes of a request like `sound`, with something wrong. Its connection is to be closed after the answer."""
    raw = sound.around(_body(sound.body, source))
    for change in source.sample(_CHANGES, k=source.choice((0, 0, 1, 1, 2, 3))):
        raw = change(raw, source)
    return raw.to_bytes()


def _body(sound: Any, source: random.Random) -> bytes:
    if sound is None:
        return b""
    content = sound
    for _ in range(source.choice((0, 1, 1, 1, 2, 4))):
        content = _changed(content, source)
    raw = content if isinstance(content, bytes) else _written(content)
    return source.choice(_ENCODINGS)(raw, source) if source.random() < 0.3 else raw


def _written(content: Any) -> bytes:
    """JSON, in which a bytes object stands for itself."""
    kept: list[bytes] = []

    def keep(value: Any) -> str:
        kept.append(value)
        return f"@{len(kept) - 1}@"

    raw = json.dumps(content, default=keep).encode()
    for index, value in enumerate(kept):
        raw = raw.replace(f'"@{index}@"'.encode(), value)
    return raw


_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1e308, 5e-324, -0.0, "", "a", "0", "\0",
    "é" * 3, "../../etc/passwd", "/" * 300, "x" * 5000, "\U0001f600", "%s%n{}", [], {}, [[]], [None], [{}],
    {"": None}, {"a": {}}, ["a"] * 300, [0] * 5000, [-1], [2**70], {"x" * 300: 1}, {"\0": 1}, {"__class__": 1},
    b"1e999", b"-Infinity", b"NaN", b'"\\ud800"', b'{"\\udfff": 1}', b'"\xff"', b"9" * 5000,
    b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 90 + b"]" * 90, b"[" * 990 + b"]" * 990,
    b"1.5", b"-", b"'a'", b"1" * 400 + b".5",
)  # fmt: skip


def _changed(content: Any, source: random.Random) -> Any:
    """The content with one of its nodes replaced, removed, repeated or joined by another."""
    if isinstance(content, dict) and content and source.random() < 0.9:
        name = source.choice(list(content))
        match source.randrange(8):
            case 0:
                return {key: value for key, value in content.items() if key != name}
            case 1:
                return {**content, source.choice(("x", "", "\0", "n", "stream", "model", name.upper())): _odd(source)}
            case _:
                return {**content, name: _changed(content[name], source)}
    if isinstance(content, list) and content and source.random() < 0.7:
        at = source.randrange(len(content))
        match source.randrange(4):
            case 0:
                return content[:at] + content[at + 1 :]
            case 1:
                return content + [content[at]] * source.choice((1, 300))
            case _:
                return [*content[:at], _changed(content[at], source), *content[at + 1 :]]
    return _odd(source)


def _odd(source: random.Random) -> Any:
    return source.choice(_ODD)


_ENCODINGS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda raw, source: raw[: source.randrange(len(raw) + 1)],
    lambda raw, source: raw + source.randbytes(3),
    lambda raw, _: raw.decode(errors="replace").encode("utf-16"),
    lambda raw, _: b"\xef\xbb\xbf" + raw,
    lambda raw, _: b"[" * 100_000 + raw,
    lambda raw, source: source.randbytes(50),
    lambda raw, source: _with_byte(raw, source.randrange(len(raw) + 1), source.randbytes(1)),
    lambda raw, _: raw * 2,
)


def _with_byte(raw: bytes, at: int, byte: bytes) -> bytes:
    return raw[:at] + byte + raw[at + 1 :]


_NAMES = (
    b"Authorization", b"Content-Type", b"X-API-Key", b"X-ARL-Key", b"X-Session-ID", b"x-stainless-retry-count",
    b"Accept", b"Expect", b"Content-Encoding", b"Transfer-Encoding", b"Content-Length", b"Host", b"Cookie", b"Upgrade",
)  # fmt: skip
_VALUES = (
    b"", b"Bearer \xff\xfe", b"\xed\xa0\x80", b"Bearer ", b"application/json; charset=klingon", b"\xe2\x82\xac",
    b"gzip", b"deflate", b"br", b"zstd", b"compress", b"gzip, gzip", b"chunked", b"-1", b"9999999999999", b"0", b"1e3",
    b"100-continue", b"multipart/form-data; boundary=a", b"multipart/form-data", b"text/html; charset=utf-16",
    b"a" * 7000, b"websocket", b"Bearer \xf0\x9f\x98\x80", b"=?utf-8?q?=ff?=",
)  # fmt: skip
_METHODS = (
    b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH", b"CONNECT", b"TRACE", b"BREW", b"get", b"P\xffT",
)  # fmt: skip
_PATHS = (
    b"/", b"*", b"//", b"/%ff", b"/%00", b"/..%2f..", b"http://a/health", b"/\xff\xfe", b"/a?b=%ff&c", b"", b"a",
    b"/" + b"a" * 7000, b"/health/", b"/e/", b"/e/x/v1/models", b"/%ed%a0%80", b"/#\xc3\xa9",
    b"/v1/%2e%2e/models", b"/e/%2f/v1/models",
)  # fmt: skip


def _headers(raw: Raw, source: random.Random) -> Raw:
    return raw.with_header(source.choice(_NAMES), source.choice(_VALUES))


def _compressed(raw: Raw, source: random.Random) -> Raw:
    packed = gzip.compress(raw.body)
    body = source.choice((packed, packed[: len(packed) // 2], packed + b"x", raw.body, b"", packed[:10] + raw.body))
    return replace(raw.with_header(b"Content-Encoding", source.choice((b"gzip", b"deflate", b"br"))), body=body)


def _chunked(raw: Raw, source: random.Random) -> Raw:
    sizes = (f"{len(raw.body):x}".encode(), b"zz", b"-1", b"ffffffffffffffffff", b"1;a=b", b"")
    body = source.choice(sizes) + b"\r\n" + raw.body + source.choice((b"\r\n0\r\n\r\n", b"", b"\r\n0\r\n", b"x"))
    return replace(raw.with_header(b"Transfer-Encoding", b"chunked"), body=body)


def _garbled(raw: Raw, source: random.Random) -> Raw:
    name, value = source.choice(raw.headers)
    return raw.with_header(name, _with_byte(value, source.randrange(len(value) + 1), source.randbytes(1)))


_CHANGES: tuple[Callable[[Raw, random.Random], Raw], ...] = (
    _headers,
    _compressed,
    _chunked,
    _garbled,
    lambda raw, source: replace(raw, method=source.choice(_METHODS)),
    lambda raw, source: replace(raw, path=source.choice(_PATHS)),
    lambda raw, source: replace(raw, path=raw.path + source.choice((b"%", b"/", b"?a=\xff", b"%00", b"\xff", b"#a"))),
)
