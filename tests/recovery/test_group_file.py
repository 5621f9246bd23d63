"""A group read back from a checkpoint is the group that was written."""

import io
import pickle
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pictures
from records import grouped, trajectory

from arl.api.images import Image, PlacedImage
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.types import COLUMNS, MAX_REWARD, Group, Trajectory, TurnSpan
from arl.training.batch_codec import FlatBatch, flatten, read_groups, restore, write_groups
from arl.training.checkpoints import UNREADABLE

numbers = st.floats(-MAX_REWARD, MAX_REWARD)


def turns(draw: st.DrawFn, n: int) -> tuple[TurnSpan, ...]:
    """Spans within n tokens; some are empty."""
    edges = sorted(draw(st.lists(st.integers(1, n), max_size=4))) if n > 1 else []
    return tuple(
        TurnSpan(start=start, stop=stop, reward=draw(numbers), state=draw(st.none() | st.text(max_size=3)))
        for start, stop in zip(edges[::2], edges[1::2], strict=False)
    )


@st.composite
def routes(draw: st.DrawFn, n: int) -> Routes | None:
    is_known = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    numbers = draw(st.lists(st.integers(0, 300), min_size=n * 6, max_size=n * 6))
    experts = (np.array(numbers) % 256).astype(draw(st.sampled_from([np.uint8, np.uint16])))
    return Routes.joined([Routes(is_known=is_known, experts=experts.reshape(n, 3, 2)[is_known])])


IMAGES = [Image.of(Pictures.new("RGB", (side, 2), "red")) for side in (1, 2, 3)]


def images(draw: st.DrawFn, mask: list[int]) -> tuple[PlacedImage, ...]:
    """Images at some of the untrained tokens."""
    places = draw(st.sets(st.sampled_from(range(len(mask))), max_size=3))
    free = [place for place in sorted(places) if not mask[place]]
    return tuple(PlacedImage(image=draw(st.sampled_from(IMAGES)), start=place, stop=place + 1) for place in free)


def arrays(draw: st.DrawFn, n: int) -> dict[str, np.ndarray]:
    """Arrays of users' own, of any kind of number; few names, so that trajectories share some."""
    shapes = st.sampled_from([(n,), (n, 2), (n, 2, 3), (n, 0)])
    kinds = st.sampled_from(["?", "<f4", "<f8", "<i2", "<u8", "<f2"])
    named = st.dictionaries(st.sampled_from(["latents", "t", "\u00e9"]), st.tuples(shapes, kinds), max_size=2)
    fill = np.random.default_rng(draw(st.integers(0, 9)))
    return {name: fill.integers(0, 2, shape).astype(kind) for name, (shape, kind) in draw(named).items()}


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(1, 12))
    versions = draw(st.lists(st.integers(-1, 5), min_size=n, max_size=n))
    mask = [int(t > 0 and v >= 0 and draw(st.booleans())) for t, v in enumerate(versions)]
    token_ids = draw(st.lists(st.integers(0, 200_000), min_size=n, max_size=n))
    others = st.none() | st.sets(st.integers(0, 9), max_size=3)
    kept = [others_of if others_of is None else others_of | {t} for t in token_ids for others_of in (draw(others),)]
    return Trajectory(
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple(
            draw(st.lists(st.floats(-50, 0, width=draw(st.sampled_from([32, 64]))), min_size=n, max_size=n))
        ),
        versions=tuple(versions),
        reward=draw(numbers),
        rewards=draw(st.dictionaries(st.text(), numbers, max_size=2)),
        turns=turns(draw, n),
        is_truncated=draw(st.booleans()),
        token_rewards=draw(st.none() | st.lists(numbers, min_size=n, max_size=n).map(tuple)),
        metrics=draw(st.dictionaries(st.text(), numbers, max_size=2)),
        role=draw(st.text(max_size=3)),
        temperature=draw(st.floats(0.1, 2)),
        kept_ids=KeptIds.of([ids and sorted(ids) for ids in kept]) if draw(st.booleans()) else None,
        routes=draw(st.none() | routes(n)),
        images=images(draw, mask),
        arrays=arrays(draw, n),
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    ids = count(draw(st.integers(0, 1000)))
    members = st.lists(trajectories(), max_size=3)
    return [
        Group(
            group_id=next(ids),
            example_id=(draw(st.integers(0, 3)), draw(st.integers(0, 9))),
            stamp=draw(st.integers(0, 5)),
            trajectories=tuple(chosen),
            episode_indices=tuple(range(len(chosen))),
            greedy_rewards=draw(st.dictionaries(st.text(), numbers, max_size=2)),
            example=draw(st.dictionaries(st.text(), st.none() | st.booleans() | numbers | st.text(), max_size=2)),
        )
        for chosen in draw(st.lists(members, max_size=3))
    ]


def written(what: list[Group]) -> io.BytesIO:
    file = io.BytesIO()
    write_groups(file, what)
    file.seek(0)
    return file


@given(groups())
@settings(deadline=None)
def test_groups_come_back_as_they_were(what: list[Group]):
    by_digest = {image.digest: image for image in IMAGES}
    assert read_groups(written(what), lambda digest, *_: by_digest[digest]) == what
    header, arrays = flatten(what)
    assert restore(header, arrays, lambda digest, *_: by_digest[digest]) == what
    assert {type(header), *map(type, arrays.values())} == {bytes, np.ndarray}


def test_arrays_of_users_own_keep_their_dtypes_and_are_read_only_views(long_group: Group):
    (trajectory,) = long_group.trajectories
    latents = np.arange(40_000, dtype=np.float16).reshape(20_000, 2)
    both = replace(trajectory, arrays={"latents": latents}), trajectory
    group = replace(long_group, trajectories=both, episode_indices=(0, 1))
    header, flat = flatten([group])
    with_arrays, without = restore(header, flat)[0].trajectories
    (column,) = with_arrays.arrays.values()
    assert (column.dtype, column.flags.writeable) == (np.float16, False)
    assert np.shares_memory(column, flat["own_0"])
    assert without.arrays == {}
    with pytest.raises(ValueError, match=r"arrays\['latents'\] has 19999 entries for 20000 tokens"):
        restore(header, {**flat, "own_0": flat["own_0"][1:]})


def test_numpys_own_numbers_become_pythons(long_group: Group):
    (trajectory,) = long_group.trajectories
    turn = TurnSpan(start=np.int64(1), stop=np.int64(2))
    numpys = {"turns": (turn,), "is_truncated": np.bool_(True), "temperature": np.float32(0.5)}
    made = replace(trajectory, **numpys)
    assert list(map(type, (made.turns[0].stop, made.is_truncated, made.temperature))) == [int, bool, float]
    group = replace(long_group, trajectories=(made,))
    assert restore(*flatten([group])) == [group]


def test_a_token_takes_13_bytes_and_restored_columns_are_read_only_views_of_the_arrays(long_group: Group):
    assert len(written([long_group]).getbuffer()) < 13 * 20_000 + 4000
    header, arrays = flatten([long_group, long_group])
    for group in restore(header, arrays):
        (trajectory,) = group.trajectories
        for name in COLUMNS[:-1]:
            column = getattr(trajectory, name)
            assert np.shares_memory(column, arrays[name])
            assert (column.dtype, column.flags.writeable) == (getattr(long_group.trajectories[0], name).dtype, False)


def test_arrays_of_another_length_than_the_header_says_are_refused(long_group: Group):
    header, arrays = flatten([long_group])
    with pytest.raises(ValueError, match="versions has 19999 entries for 20000 tokens"):
        restore(header, {**arrays, "versions": arrays["versions"][1:]})


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9])
def test_a_changed_byte_is_noticed(long_group: Group, position: float):
    content = bytearray(written([long_group]).getvalue())
    content[int(position * len(content))] ^= 1
    with pytest.raises(UNREADABLE):
        read_groups(io.BytesIO(content))


@pytest.fixture
def long_group() -> Group:
    """One trajectory of 20,000 tokens in ten turns, with logprobs of float32."""
    n = 20_000
    random = np.random.default_rng(0)
    sampled = tuple(int(t % 2000 >= 1000) for t in range(n))
    trajectory = Trajectory(
        token_ids=tuple(random.integers(0, 150_000, n).tolist()),
        loss_mask=sampled,
        behavior_logprobs=tuple((-random.random(n, np.float32)).tolist()),
        versions=tuple(t // 4000 if s else -1 for t, s in enumerate(sampled)),
        reward=1.0,
    )
    return Group(group_id=3, example_id=(0, 1), stamp=0, trajectories=(trajectory,), episode_indices=(0,))


def test_a_batch_has_each_image_once_and_its_file_names_it_alone() -> None:
    image = Image.of(Pictures.effect_noise((200, 200), 100))
    shows = trajectory(images=(PlacedImage(image=image, start=0, stop=1),))
    groups = [grouped(*[shows] * 4)] * 3
    batch = FlatBatch.of(groups[1:], groups[:1])
    assert batch.images == (image,)
    assert len(image.data) < batch.num_bytes < len(image.data) + 10_000
    sent = pickle.loads(pickle.dumps(batch))
    assert sent.groups() == (groups[1:], groups[:1])
    assert len({id(placed.image) for group in sent.groups()[0] for t in group.trajectories for placed in t.images}) == 1
    file = written(groups)
    assert len(file.getbuffer()) < len(image.data) / 2
    with pytest.raises(ValueError, match=f"the image {image.digest} is needed"):
        read_groups(file)
