"""Routes: cut, joined, written and read as the experts of each token."""

import numpy as np
import pytest

from arl.api.routed_experts import Routes, Routing

NumExperts = int


def random_routes(seed: int, num_tokens: int = 20, num_experts: NumExperts = 8) -> Routes:
    generator = np.random.default_rng(seed)
    is_known = generator.random(num_tokens) < 0.6
    dtype = Routing(num_layers=3, experts_per_token=2, num_experts=num_experts).dtype
    experts = generator.integers(0, num_experts, (int(is_known.sum()), 3, 2)).astype(dtype)
    return Routes(is_known=is_known, experts=experts)


def slow(routes: Routes | None, length: int) -> list[list[list[int]] | None]:
    """The experts of each token, or None."""
    if routes is None:
        return [None] * length
    rows = iter(routes.experts.tolist())
    return [next(rows) if known else None for known in routes.is_known]


@pytest.mark.parametrize("seed", range(5))
def test_taking_and_joining_is_done_token_by_token(seed: int) -> None:
    routes, generator = random_routes(seed), np.random.default_rng(seed)
    wanted = slow(routes, 20)
    for places in (generator.permutation(20)[:11], slice(3, 15), np.array([], np.int64), slice(4, 4)):
        chosen = [wanted[i] for i in np.arange(20)[places]]
        assert slow(routes.take(places), len(chosen)) == chosen
    other = random_routes(seed + 100, 7)
    joined = Routes.joined([2, routes, 0, other, 1])
    assert slow(joined, 0) == [None] * 2 + wanted + slow(other, 7) + [None]


@pytest.mark.parametrize(("num_experts", "width"), [(8, 1), (256, 1), (257, 2)])
def test_they_are_written_in_the_smallest_numbers_and_read_again(num_experts: NumExperts, width: int) -> None:
    routes = random_routes(1, num_experts=num_experts)
    encoded = routes.encode()
    assert Routes.decode(encoded) == routes
    assert len(encoded) == 13 + 3 + int(routes.is_known.sum()) * 6 * width
    assert routes.num_bytes == 20 + int(routes.is_known.sum()) * 6 * width
    for broken in (encoded[:-1], encoded + b"0", encoded[:5]):
        with pytest.raises(ValueError, match="routes"):
            Routes.decode(broken)


def test_routes_of_no_known_token_are_none() -> None:
    routes = random_routes(0)
    assert Routes.joined([3, 4]) is None
    assert Routes.joined([]) is None
    assert routes.take(np.flatnonzero(~routes.is_known)) is None


def test_routes_of_different_models_cannot_be_joined() -> None:
    others = Routes.of(np.zeros((2, 4, 2), np.uint8))
    with pytest.raises(ValueError, match="3 layers of 2 experts and 4 layers of 2 experts"):
        Routes.joined([random_routes(0), others])


def test_experts_that_are_not_those_of_the_known_tokens_are_refused() -> None:
    for shape in ((2, 3, 2), (3, 6)):
        with pytest.raises(ValueError, match="of 3 known tokens came as experts of shape"):
            Routes(is_known=np.array([True, False, True, True]), experts=np.zeros(shape, np.uint8))


def test_keys_are_equal_where_routes_are() -> None:
    routes = Routes.of(np.array([[[0, 1]], [[1, 0]], [[0, 1]]], np.uint16))
    one, two, three = routes.keys()
    assert one == three != two
    padded = Routes.joined([1, routes])
    assert padded is not None
    assert padded.keys() == [b"", one, two, three]
