"""Environments of verifiers run to their end, and the trajectories are what verifiers itself recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import verifiers.v1 as vf
from letters_env import LettersEnv
from renderers import DefaultRendererConfig
from said import TOKENIZER, encode, saying, trained
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arl.api import ModelRequest, ModelResponse, SamplingParams, ScriptedEngine, Trajectory
from arl.workflow.verifiers_agent import VerifiersWorkflow, local_environment

RENDERER = DefaultRendererConfig(tool_parser="qwen3")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def same_as_recorded(trajectory: Trajectory, branch: vf.Branch) -> bool:
    return (
        list(trajectory.token_ids) == branch.token_ids
        and list(map(bool, trajectory.loss_mask)) == branch.sampled_mask
        and list(trajectory.behavior_logprobs) == branch.logprobs
    )


def unevenly(*answers: str) -> ScriptedEngine:
    """Each token has a logprob of its own."""
    remaining = iter(answers)

    def answer(_: ModelRequest) -> ModelResponse:
        ids = (*encode(next(remaining)), TOKENIZER.eos_token_id)
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(ids)))
        return ModelResponse(
            output_ids=ids, output_logprobs=logprobs, output_versions=(3,) * len(ids), stop_reason="stop"
        )

    return ScriptedEngine(answer)


async def test_a_single_turn_gives_the_trajectory_that_verifiers_recorded(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"taskset": {"id": "letters_env"}})
    assert isinstance(env, LettersEnv)
    workflow = VerifiersWorkflow(env, tokenizer, renderer=RENDERER)
    rows = workflow.rows(env.taskset)
    async with workflow:
        (trajectory,) = await workflow.arun_episode(unevenly("e"), rows[0])
    (branch,) = env.episodes[0].traces[0].branches
    assert same_as_recorded(trajectory, branch)
    assert trained(trajectory) == ["e"]
    assert trajectory.reward == 1.5
    assert trajectory.rewards == {"correct": 1.0, "short": 0.5}
    assert trajectory.metrics == {"turns": 1, "length": 1.0}
    assert trajectory.oldest_version == 3
