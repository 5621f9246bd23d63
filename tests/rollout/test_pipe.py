"""The socket between the controller's process and a worker."""

import asyncio
import socket

from arl.workers.pipe import Close, Drop, Pipe, Ready, frame


async def test_what_the_other_end_said_before_it_was_closed_is_read_although_a_write_fails() -> None:
    taken: list[object] = []
    ours, theirs = socket.socketpair()
    _, pipe = await asyncio.get_running_loop().create_connection(lambda: Pipe(taken.append), sock=ours)
    said = [Drop(number, 1) for number in range(1000)]
    theirs.setblocking(False)
    theirs.sendall(b"".join(map(frame, said)))
    theirs.sendall(frame(Ready()))
    theirs.close()
    pipe.write(frame(Close()))  # fails at once: nobody reads it
    await asyncio.wait_for(pipe.ended, 10)
    assert taken == [*said, Ready()]
    assert not pipe.fault
