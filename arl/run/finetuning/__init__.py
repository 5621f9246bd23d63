"""Fine-tuning on data: demonstrations (SFT), preferences (DPO, IPO), and pairs for a reward model.

| module | what lives there |
|---|---|
| examples | rows of datasets -> examples, checked; their minibatches, and the loop over a train engine |
| job | the runs of `arl finetune` |
| warm_starts | a tiny model, made on the spot and fine-tuned on demonstrations |
"""

from typing import TYPE_CHECKING

from arl.runtime import lazy_names

if TYPE_CHECKING:
    from arl.algorithm.losses.preferences import PreferenceLoss, RewardModelLoss
    from arl.run.finetuning.examples import Demonstration, Preference, finetune, to_demonstrations, to_preferences
    from arl.run.finetuning.warm_starts import tool_call, warm_start

_HOMES = {
    "arl.algorithm.losses.preferences": "PreferenceLoss RewardModelLoss",
    "arl.run.finetuning.examples": "Demonstration Preference finetune to_demonstrations to_preferences",
    "arl.run.finetuning.warm_starts": "tool_call warm_start",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]
