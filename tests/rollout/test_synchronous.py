"""max_staleness=0 is synchronous training, bit for bit."""

from hypothesis import given, settings
from hypothesis import strategies as st
from players import Moody, controlled, engine_with_latency, examples, serve, train
from records import grouped
from virtual_time import run_in_virtual_time

from arl.api.types import Group
from arl.rollout.ledger import ExampleLedger

NUM_EXAMPLES, VERSIONS, BATCH_SIZE, GROUP_SIZE = 23, 12, 3, 2


async def plain_loop(seed: int) -> list[list[Group]]:
    """Generate a batch, one episode after the other; train; update the weights; again."""
    engine, rows = engine_with_latency(), examples(NUM_EXAMPLES)
    ledger = ExampleLedger(NUM_EXAMPLES, shuffle=True, seed=seed)
    batches: list[list[Group]] = []
    for version in range(VERSIONS):
        batch: list[Group] = []
        while len(batch) < BATCH_SIZE:
            issue = ledger.issue()
            row = rows[issue.example_id[1]]
            try:
                episodes = [await Moody().arun_episode(engine, row) for _ in range(GROUP_SIZE)]
            except RuntimeError:
                continue
            trajectories = tuple(t for t in episodes if t is not None)
            if len(trajectories) == GROUP_SIZE:
                known = {"number": issue.group_id, "stamp": version, "example_id": issue.example_id, "example": row}
                batch.append(grouped(*trajectories, **known))
        batches.append(batch)
        await serve(engine, version + 1)
    return batches


@given(seed=st.integers(0, 2**32), latency_seed=st.integers(0, 2**32), cap=st.integers(1, 20))
@settings(max_examples=15, deadline=None)
def test_batches_equal_those_of_a_plain_synchronous_loop(seed: int, latency_seed: int, cap: int) -> None:
    async def asynchronous() -> list[list[Group]]:
        controller, buffer, engine = controlled(
            Moody(),
            NUM_EXAMPLES,
            engine_with_latency(latency_seed),
            seed=seed,
            batch_size=BATCH_SIZE,
            group_size=GROUP_SIZE,
            max_staleness=0,
            max_concurrent_episodes=cap,
            max_failure_rate=1.0,
            episode_retries=0,
        )
        return await train(controller, buffer, engine, range(VERSIONS))

    assert run_in_virtual_time(asynchronous()) == run_in_virtual_time(plain_loop(seed))
