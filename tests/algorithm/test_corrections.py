"""The weight of the behavior policy's tokens, against its definition in plain Python."""

import pytest
import torch
from loss_references import Tokens, behavior_weights, joined, random_batch, trajectories_of

from arl.algorithm.losses.reinforcement import behavior_weight
from arl.algorithm.losses.surrogates import Trajectories
from arl.api.objective import CorrectionConfig

KINDS = {
    "none": {"kind": "none"},
    "truncate": {"kind": "truncate", "upper": 1.3},
    "mask": {"kind": "mask", "upper": 1.3},
    "icepop": {"kind": "mask", "lower": 0.7, "upper": 1.3},
}
every_correction = pytest.mark.parametrize(
    "config",
    [
        CorrectionConfig(**settings, level=level, veto=veto)
        for settings in KINDS.values()
        for level in ("token", "sequence", "geometric")
        for veto in (None, 0.6)
    ],
    ids=lambda config: f"{config.kind}-{config.level}-{config.lower}-{config.veto}",
)


def weights_of(batch: list[Tokens], config: CorrectionConfig) -> list[float]:
    log_weight = joined(batch, "proximal") - joined(batch, "behavior")
    return behavior_weight(log_weight, trajectories_of(batch), config).tolist()


@every_correction
@pytest.mark.parametrize("seed", range(3))
def test_the_weight_is_that_of_its_formula(config: CorrectionConfig, seed: int):
    batch = random_batch(seed)
    expected = [w for t in batch for w in behavior_weights(t.proximal, t.behavior, config)]
    assert weights_of(batch, config) == pytest.approx(expected, abs=1e-12)


@every_correction
def test_weights_are_finite_wherever_the_policies_are(config: CorrectionConfig):
    for log_weight in (torch.tensor([-1e4, -25.0, 0.0, 25.0, 1e4] * 200), torch.full((1000,), 0.1)):
        for ids in (torch.zeros(1000, dtype=torch.int64), torch.arange(1000)):
            assert behavior_weight(log_weight, Trajectories.of(ids), config).isfinite().all()


def test_the_weight_has_no_gradient():
    log_weight = torch.zeros(2, requires_grad=True)
    assert not behavior_weight(log_weight, Trajectories.of(torch.zeros(2).long()), CorrectionConfig()).requires_grad
