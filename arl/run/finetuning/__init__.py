"""Fine-tuning on data: demonstrations (SFT), preferences (DPO, IPO), and pairs for a reward model.

| module | what lives there |
|---|---|
| examples | the checks of examples, their minibatches, and the loop over a train engine |
| chats | rows of datasets -> examples, through the model's chat template |
| job | the runs of `arl finetune` |
| warm_starts | a tiny model, made on the spot and fine-tuned on demonstrations |
"""

from typing import TYPE_CHECKING

from arl.runtime import lazy_names

if TYPE_CHECKING:
    from arl.algorithm.losses.supervised import PreferenceLoss, RewardModelLoss
    from arl.run.finetuning.chats import to_demonstrations, to_preferences
    from arl.run.finetuning.examples import Demonstration, Preference, finetune
    from arl.run.finetuning.warm_starts import tool_call, warm_start

_HOMES = {
    "arl.algorithm.losses.supervised": "PreferenceLoss RewardModelLoss",
    "arl.run.finetuning.chats": "to_demonstrations to_preferences",
    "arl.run.finetuning.examples": "Demonstration Preference finetune",
    "arl.run.finetuning.warm_starts": "tool_call warm_start",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]
