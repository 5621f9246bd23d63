"""Critics: a tiny one on disk, what Hugging Face's own class says of a sequence, and how a plain loop trains one."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn
from train_models import write_model
from train_sequences import random_sequences
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen3ForSequenceClassification,
)

from arl.algorithm.losses import PolicyLoss
from arl.algorithm.losses.reinforcement import ActorCriticLoss, ValueLoss
from arl.api.algorithm import preset
from arl.api.types import TrainSequence

VALUE = ValueLoss(value_clip=0.2)
BOTH = ActorCriticLoss(
    policy=PolicyLoss.of(preset("decoupled_ppo", correction={"upper": 2.0}, minibatches=2)),
    value=VALUE,
    coefficient=0.5,
)


def write_critic(directory: Path) -> Path:
    """A Qwen3 with a head of one label, which no one asks for the score of a padded text."""
    return write_model(directory, tied=False, model_class=Qwen3ForSequenceClassification, num_labels=1)


def load_critic(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself, with attention in plain operations."""
    return AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()


def score_of(model: PreTrainedModel) -> nn.Linear:
    return cast("nn.Linear", model.score)


def sequences_with_returns(count: int = 9, seed: int = 1) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(seed)
    return [
        replace(
            sequence,
            values=0.1 * torch.randn(len(sequence), generator=generator),
            returns=torch.randn(len(sequence), generator=generator),
        )
        for sequence in random_sequences(count, seed=seed)
    ]


def scored(token_ids: torch.Tensor) -> TrainSequence:
    """A text whose score is the value of the token behind it, whichever that is."""
    longer = torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)])
    return TrainSequence(token_ids=longer, loss_mask=torch.arange(len(longer)) == len(token_ids))


@torch.no_grad()
def slow_values(model: PreTrainedModel, sequence: TrainSequence) -> torch.Tensor:
    """One forward pass of the model as it is for each trained token, over the tokens before it alone."""
    values = torch.zeros(len(sequence))
    for place in sequence.loss_mask.nonzero()[:, 0].tolist():
        values[place] = model(input_ids=sequence.token_ids[None, :place]).logits[0, 0]
    return values
