"""Online DPO and KTO from groups to a number, against plain Python: one pair or episode at a time."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from advantage_cases import group, of_rewards, random_groups, taken, trajectory
from advantage_references import Rated, dpo, kto, pairs_of, z0
from loss_references import gradient

from arl.algorithm.advantages import arranged, with_advantages
from arl.algorithm.batch import Batch, loss_weights
from arl.algorithm.groups import comparison_metrics, reference_points
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.trained_tokens import packed_tokens
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs
from arl.api.types import Group

CASES: dict[str, AlgorithmConfig] = {
    "best against worst": preset("online_dpo", loss={"beta": 0.7}),
    "ipo": preset("online_dpo", loss={"link": "ipo", "beta": 0.3}),
    "hinge": preset("online_dpo", loss={"link": "hinge", "beta": 0.8}),
    "kto": preset("kto"),
    "kto, not balanced": preset("kto", advantage={"balanced": False}, loss={"beta": 0.6}),
    "kto, threshold": preset("kto", advantage={"threshold": 0.3}, loss={"beta": 0.4}),
}
every_case = pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
Numbers = list[float]


def prepared(groups: Sequence[Group], config: AlgorithmConfig) -> Batch:
    batch = with_advantages(taken(groups, config), config)
    return replace(batch, loss_weights=loss_weights(batch, config.aggregation))


def packed(batch: Batch) -> PackedTokens:
    """The trained tokens, in float64."""
    flat = batch.sequences()
    columns = {name: c.double() if c.is_floating_point() else c for name, c in flat.columns.items()}
    return packed_tokens(replace(flat, columns=columns))


def evaluated(batch: Batch, config: AlgorithmConfig, current: torch.Tensor) -> tuple[TokenLosses, float, Numbers]:
    """current: float64[M], of the trained tokens. The losses, their sum and its gradient."""
    tokens, current = packed(batch), current.clone().requires_grad_()
    loss = PolicyLoss.of(config, version=3)
    losses = loss(TokenOutputs(logprobs=current, entropy=torch.zeros_like(current), values=current), tokens)
    total = (losses.loss * tokens.loss_weights).sum()
    return losses, total.item(), torch.autograd.grad(total, current)[0].tolist()


def some_current(batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return -2 * torch.rand(int(batch.loss_mask.sum()), generator=generator, dtype=torch.float64)


def episodes_of(groups: Sequence[Group], config: AlgorithmConfig) -> dict[tuple[int, str], list[Rated]]:
    """(group_id, role) -> its episodes."""
    everyone: dict[tuple[int, str], list[Rated]] = defaultdict(list)
    for one in groups:
        for role in {t.role for t in one.trajectories}:
            for index in set(one.episode_indices):
                pairs = zip(one.trajectories, one.episode_indices, strict=True)
                mine = [t for t, i in pairs if i == index and t.role == role]
                if mine:
                    process = sum(sum(t.process_rewards) for t in mine)
                    reward = math.fsum(t.reward + process for t in mine) / len(mine)
                    trained = any(t.loss_mask.any() for t in mine)
                    everyone[one.group_id, role].append(Rated(index=index, reward=reward, is_trained=trained))
    return everyone


def expected_loss(groups: Sequence[Group], before: Batch, after: Batch, config: AlgorithmConfig, current: Numbers):
    """The mean over all pairs, or all labelled episodes, from the trained tokens' current logprobs.

    before: the batch of which every token is still trained. after: A and z0 of the labelled episodes are read from it.
    """
    whole = torch.zeros(len(after.loss_mask), dtype=torch.float64)
    whole[after.loss_mask] = torch.tensor(current, dtype=torch.float64)
    columns = [whole, before.reference_logprobs.double(), after.advantages, after.values]
    tokens: Mapping[Any, list[Numbers]] = defaultdict(lambda: [[], [], [], []])
    rows = zip(*(before.split(column) for column in (*columns, before.loss_mask)), strict=True)
    members = [(g, t, e) for g in groups for t, e in zip(g.trajectories, g.episode_indices, strict=True)]
    for (g, t, e), (*numbers, mask) in zip(members, rows, strict=True):
        for row, column in zip(tokens[g.group_id, t.role, e], numbers, strict=True):
            row += column[mask].tolist()
    if config.loss.kind == "dpo":
        losses = [
            dpo(*tokens[*key, better.index][:2], *tokens[*key, worse.index][:2], config.loss)
            for key, rated in episodes_of(groups, config).items()
            for better, worse in pairs_of(rated)
        ]
    else:
        labelled = [row for row in tokens.values() if any(row[2])]
        losses = [kto(c, reference, a[0], point[0], config.loss) for c, reference, a, point in labelled]  # pyright: ignore[reportArgumentType]
    return math.fsum(losses) / max(len(losses), 1)


@every_case
@pytest.mark.parametrize("seed", [96, 112, 253])
def test_a_loss_and_its_gradient_are_the_papers_mean_over_pairs_or_episodes(config: AlgorithmConfig, seed: int):
    """In two roles. Episodes have several trajectories, and some train nothing."""
    groups = random_groups(seed, has_branches=True)
    before, batch = taken(groups, config), prepared(groups, config)
    current = some_current(batch)
    _, total, slopes = evaluated(batch, config, current)

    def expected(numbers: Sequence[float]) -> float:
        return expected_loss(groups, before, batch, config, list(numbers))

    assert total == pytest.approx(expected(current.tolist()), rel=1e-7, abs=1e-6)
    assert len(slopes) > 12
    assert slopes == pytest.approx(gradient(expected, current.tolist()), rel=1e-7, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_reference_point_is_the_mean_log_ratio_of_the_compared_episodes_and_at_least_0(seed: int):
    config = CASES["kto"]
    groups = random_groups(seed, has_branches=True)
    batch = prepared(groups, config)
    for log_ratio in (batch.proximal_logprobs.double() - batch.reference_logprobs.double(), -batch.proximal_logprobs):
        moved = replace(batch, proximal_logprobs=log_ratio.float(), reference_logprobs=torch.zeros(len(log_ratio)))
        rows: dict[int, Numbers] = defaultdict(list)
        for episode, row, mask in zip(
            batch.episode, batch.split(moved.proximal_logprobs), batch.split(batch.loss_mask), strict=True
        ):
            if mask.any():
                rows[episode] += row[mask].tolist()
        points = reference_points(moved)
        assert points.tolist() == pytest.approx([z0(list(rows.values()))] * len(points), rel=1e-6)


def test_each_task_has_a_reference_point_of_its_own_as_if_it_were_alone():
    config = CASES["kto"]
    first, second = ([replace(g, task=task) for g in random_groups(seed)] for task, seed in (("a", 3), ("b", 4)))
    both, alone = prepared([*first, *second], config), prepared(first, config)
    assert both.values[: len(alone.values)].tolist() == alone.values.tolist()
    assert both.advantages[: len(alone.values)].tolist() == alone.advantages.tolist()


@every_case
def test_what_is_not_compared_is_not_trained_and_comparing_again_changes_nothing(config: AlgorithmConfig):
    equal = of_rewards(0.0, 0.0)
    batch = taken([*random_groups(96, has_branches=True), replace(equal, group_id=9)], config)
    once = arranged(batch, config)
    assert (0 < once.loss_mask.sum() < batch.loss_mask.sum()) == (getattr(config.advantage, "threshold", None) is None)
    assert once.loss_mask.equal(batch.loss_mask & (once.advantages != 0))
    again = arranged(once, config)
    assert (again.units, again.advantages.tolist()) == (once.units, once.advantages.tolist())
    assert again.loss_mask.equal(once.loss_mask)


@pytest.mark.parametrize("name", ["online_dpo", "kto"])
def test_rewards_on_another_scale_compare_alike(name: str):
    config = preset(name)
    rewards = [(0.0, 0.25, 1.0, 0.5), (1.0, 1.0, 0.0, 1.0), (0.5, 0.5, 0.5, 0.5)]
    plain = arranged(Batch.of([of_rewards(*row) for row in rewards]), config)
    moved = arranged(Batch.of([of_rewards(*(8 * r - 3 for r in row)) for row in rewards]), config)
    assert (plain.units, plain.advantages.tolist()) == (moved.units, moved.advantages.tolist())


def signs(config: AlgorithmConfig, *rewards: float) -> Numbers:
    batch = arranged(Batch.of([of_rewards(*rewards)]), config)
    return [row[1].item() for row in batch.split(batch.advantages)]


def test_pairs_are_best_and_worst_and_of_equals_the_one_that_was_started_first_is_the_better():
    best = CASES["best against worst"]
    assert signs(best, 0.2, 0.9, 0.1, 0.5) == [0, 1, -1, 0]
    assert signs(best, 0.0, 1.0, 1.0, 0.0) == [0, 1, 0, -1]
    assert signs(best, 0.3, 0.1 + 0.2, 0.3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("online_dpo", {"uncompared_groups": 2 / 3, "pairs": 1.0}),
        ("kto", {"uncompared_groups": 2 / 3, "labelled_episodes": 4.0, "desirable": 0.25}),
    ],
)
def test_groups_that_compare_nothing_are_counted(name: str, expected: dict[str, float]):
    config = preset(name)
    groups = [of_rewards(1.0, 0.0, 0.0, 0.0), of_rewards(1.0, 1.0), of_rewards(0.0)]
    assert comparison_metrics(arranged(Batch.of(groups), config), config) == pytest.approx(expected)
    assert comparison_metrics(Batch.of(groups), preset("grpo")) == {}
    nothing = comparison_metrics(arranged(Batch.of(groups[1:]), config), config)
    assert nothing["uncompared_groups"] == 1
    assert "desirable" not in nothing


def test_metrics_are_means_over_pairs_however_long_they_are():
    """The second pair's better episode branched."""
    config = preset("online_dpo", loss={"beta": 0.5})
    short = group(trajectory(1.0, (0, 1)), trajectory(0.0, (0, 1)))
    long = group(
        trajectory(0.0, (0, 1, 1, 1)), trajectory(1.0, (0, 1)), trajectory(1.0, (0, 1)), episodes=(0, 1, 1), group_id=1
    )
    batch = with_advantages(Batch.of([short, long]), config)
    batch = replace(batch, loss_weights=loss_weights(batch, config.aggregation))
    losses, _, _ = evaluated(batch, config, torch.tensor([2.0, 1.0, -1.0, -1.0, -1.0, -3.0, -2.0]).double())
    found = {name: float((v * packed(batch).loss_weights).sum()) for name, v in losses.weighted.items()}
    expected = {"margin": 0.5 * (1 - 2) / 2, "accuracy": 0.5, "chosen_logratio": -1.5, "rejected_logratio": -1.0}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("level", "share"), [("sequence", 1.0), ("geometric", 1 / 4)])
def test_a_weight_of_stale_tokens_is_that_of_the_whole_pair(level: str, share: float):
    config = preset("online_dpo", proximal="recomputed", weights=[level], minibatches=2)
    batch = prepared([group(trajectory(1.0, (0, 1, 1, 1)), trajectory(0.0, (0, 1)))], config)
    losses, _, _ = evaluated(batch, config, some_current(batch))
    moved = (batch.proximal_logprobs - batch.behavior_logprobs)[batch.loss_mask].sum().item()
    assert losses.means["behavior_weight"].tolist() == pytest.approx([math.exp(share * moved)] * 4, rel=1e-5)


@every_case
def test_almost_impossible_episodes_leave_everything_finite_and_a_loss_never_waits_for_its_device(
    config: AlgorithmConfig,
):
    batch = prepared([of_rewards(1.0, 0.0)], config)
    for far in ([-1e4, -1e4, 0.0, 0.0], [0.0, 0.0, -1e4, -1e4]):
        losses, total, slopes = evaluated(batch, config, torch.tensor(far).double())
        assert all(map(math.isfinite, [total, *slopes]))
        assert all(value.isfinite().all() and not value.requires_grad for value in losses.weighted.values())
    numbers, whole = torch.zeros(6, device="meta"), torch.zeros(6, device="meta", dtype=torch.int64)
    tokens = PackedTokens(behavior_logprobs=numbers, sequence_ids=whole, unit_ids=whole)
    current = numbers.clone().requires_grad_()
    found = PolicyLoss.of(config)(TokenOutputs(logprobs=current, entropy=numbers, values=numbers), tokens)
    found.loss.sum().backward()
    assert found.loss.shape == (6,)


@every_case
def test_episodes_that_are_not_compared_change_nothing_beside_those_that_are(config: AlgorithmConfig):
    """As a train engine of one process takes them: all sequences together."""
    rewards = (1.0, *[0.5] * 5, 0.0)
    for order in (rewards, rewards[::-1], sorted(rewards, key=lambda r: abs(r - 0.4))):
        sequences = prepared([of_rewards(*order)], config).sequences()
        found = []
        for chosen in (sequences, [s for s in sequences if s.loss_mask.any()]):
            tokens = packed_tokens(chosen)
            current = tokens.behavior_logprobs - 0.1
            losses = PolicyLoss.of(config, version=3)(
                TokenOutputs(logprobs=current, entropy=torch.zeros_like(current), values=current), tokens
            )
            found.append((tokens.unit_ids.tolist(), losses.loss.tolist()))
        assert found[0] == found[1]


@every_case
def test_a_microbatch_without_pairs_reports_the_same_names(config: AlgorithmConfig):
    nothing = evaluated(prepared([of_rewards(1.0, 1.0)], preset("online_dpo")), config, torch.zeros(0).double())[0]
    batch = prepared([of_rewards(1.0, 0.0)], config)
    something = evaluated(batch, config, some_current(batch))[0]
    for kind in ("means", "maxima", "weighted", "quotients", "sample_sizes"):
        assert list(getattr(nothing, kind)) == list(getattr(something, kind))
