"""The socket between the controller's process and a worker."""

import asyncio
import gc
import socket

import pytest

from arl.api.images import Image, PlacedImage
from arl.rollout.workers.messages import Close, Drop, HeldImages, Pipe, Ready, SentImages, frame


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


FILE = b"x" * 1000


def placed(image: Image, start: int = 0) -> PlacedImage:
    return PlacedImage(image=image, start=start, stop=start + 1)


def test_a_receiver_gets_a_file_once_while_the_sender_holds_the_image_and_again_afterwards() -> None:
    sent, held = SentImages(), HeldImages()
    image = Image.kept(FILE, 4, 2)
    first, second = (sent.pickled((placed(image), placed(image, 1), number)) for number in range(2))
    assert len(first) < 2 * len(FILE)
    assert len(second) < len(FILE)
    there = held.unpickled(first)
    assert there == (placed(image), placed(image, 1), 0)
    assert held.unpickled(second)[0].image is there[0].image
    assert sent.gone() == []
    digest, there = image.digest, None
    held = HeldImages()  # as in another process: equal images are one object in one
    held.unpickled(sent.pickled(()))
    del image
    assert sent.gone() == [digest]
    again = sent.pickled(Image.kept(FILE, 4, 2))
    assert len(again) > len(FILE)


def test_an_image_of_a_message_that_cannot_be_sent_crosses_with_the_next_one() -> None:
    sent, image = SentImages(), Image.kept(FILE, 4, 2)
    with pytest.raises((AttributeError, TypeError)):
        sent.pickled((image, lambda: None))
    assert HeldImages().unpickled(sent.pickled(image)) == image


def test_an_image_that_never_crossed_is_not_to_be_forgotten_there() -> None:
    sent, image = SentImages(), Image.kept(FILE, 4, 2)
    with pytest.raises((AttributeError, TypeError)):
        sent.pickled((image, lambda: None))
    del image
    gc.collect()  # the error's traceback holds it
    assert sent.gone() == []


async def test_the_other_end_forgets_an_image_that_is_gone() -> None:
    taken: list[object] = []
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, here = await loop.create_connection(lambda: Pipe(taken.append), sock=ours)
    _, there = await loop.create_connection(lambda: Pipe(taken.append), sock=theirs)
    for number in range(3):  # a new object each time
        here.send(Image.kept(FILE + bytes([number]), 4, 2))
        here.send(Close())
    here.close()
    await asyncio.wait_for(there.ended, 10)
    there.close()
    assert [type(message) for message in taken] == [Image, Close] * 3
    assert not there._held_images._held
