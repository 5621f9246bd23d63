"""Counts that are kept up to date say what counting anew would say."""

import random

from arl.engine.client.loads import Loads, Versions


def test_the_least_loaded_member_is_the_one_that_a_search_finds():
    rng, members = random.Random(0), [f"server {number}" for number in range(40)]
    loads, loaded = Loads[str](), dict[int, int]()
    for _ in range(20_000):
        number = rng.randrange(40)
        if rng.random() < 0.2:
            loads.remove(number)
            loaded.pop(number, None)
        else:
            loaded[number] = max(0, loaded.get(number, rng.randrange(5)) + rng.choice((-1, 1)))
            loads.put(number, loaded[number], members[number])
        avoid = rng.choice((None, rng.randrange(40)))
        found = min(loaded, key=lambda n: (n == avoid, loaded[n], n), default=None)
        assert loads.least(None if avoid is None else members[avoid]) == (None if found is None else members[found])
        assert (len(loads), loads.total) == (len(loaded), sum(loaded.values()))
    assert len(loads._heap) <= 2 * 40 + 64


def test_the_oldest_version_is_the_one_that_a_search_finds():
    rng = random.Random(0)
    versions, held = Versions(), dict[int, int]()
    for _ in range(20_000):
        number, version = rng.randrange(8), rng.choice((None, *range(6)))
        versions.put(number, version)
        held.pop(number, None)
        if version is not None:
            held[number] = version
        assert versions.oldest == min(held.values(), default=None)
        assert len(versions) == len(held)
