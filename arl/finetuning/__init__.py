"""Fine-tuning on data: demonstrations (SFT), preferences (DPO, IPO), and pairs for a reward model.

| module | what lives there |
|---|---|
| demonstrations, pairs | the checks of examples, and the loops over a train engine |
| chats | rows of datasets -> examples, through the model's chat template |
| tasks, job | the runs of `arl sft`, `arl dpo` and `arl rm` |
| warm_starts | a tiny model, made on the spot and fine-tuned on demonstrations |
"""

from typing import TYPE_CHECKING

from arl.lazy import lazy_names

if TYPE_CHECKING:
    from arl.algorithm.losses.supervised import PreferenceLoss, RewardModelLoss
    from arl.finetuning.chats import to_demonstrations, to_preferences, to_texts
    from arl.finetuning.demonstrations import Demonstration, finetune
    from arl.finetuning.pairs import Preference, train_preferences, train_reward_model
    from arl.finetuning.warm_starts import tool_call, warm_start

_HOMES = {
    "arl.algorithm.losses.supervised": "PreferenceLoss RewardModelLoss",
    "arl.finetuning.chats": "to_demonstrations to_preferences to_texts",
    "arl.finetuning.demonstrations": "Demonstration finetune",
    "arl.finetuning.pairs": "Preference train_preferences train_reward_model",
    "arl.finetuning.warm_starts": "tool_call warm_start",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]
