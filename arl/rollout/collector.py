"""Python's garbage collector beside an event loop with thousands of episodes.

Python looks at new objects after 700 more were made than were freed, and at older ones after some such rounds. With
many episodes, as many are freed as made: young objects become hundreds of thousands before they are looked at, and each
look blocks the event loop for up to half a second. Here they are looked at by the clock, when they are still few.
"""

from __future__ import annotations

import asyncio
import gc
import time

_YOUNG_EVERY_S = 0.05
_ALL_EVERY_S = 10.0
"""Objects that live longer than _YOUNG_EVERY_S, and refer to each other when they are left, take memory until then."""
_ALL_SHARE = 0.02
"""Of the time that looking at all objects may take: more objects are looked at less often."""
_BACKSTOP = (100_000, 1 << 30, 1 << 30)
"""For gc.set_threshold: while something blocks the event loop, Python looks at young objects itself."""
_PYTHONS = 10_000
"""Thresholds up to Python's defaults are replaced (700; 2,000 in newer ones). Others, and 0, were chosen by someone."""


async def collect_garbage() -> None:
    """Until cancelled. Does nothing if the process has turned the collector off or made it rarer itself.

    What was there before, such as all that was imported (0.2 s each time), is not looked at. What the process has
    frozen itself stays frozen.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or not 0 < before[0] < _PYTHONS:
        return
    gc.collect()  # what is garbage now, such as a notebook's last model, would else stay until the end
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    gc.set_threshold(*_BACKSTOP)
    try:
        next_all = time.monotonic() + _ALL_EVERY_S
        while True:
            await asyncio.sleep(_YOUNG_EVERY_S)
            began = time.monotonic()
            gc.collect(2 if began > next_all else 0)
            if began > next_all:
                ended = time.monotonic()
                next_all = ended + max(_ALL_EVERY_S, (ended - began) / _ALL_SHARE)
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()
