"""A user writes and tests a workflow with nothing but the face, in a process that never loads torch."""

import subprocess
import sys

USERS_OWN_TEST = """
import asyncio
import sys

from arl import ModelRequest, RolloutWorkflow, SamplingParams, ScriptedEngine, Trajectory


class Guess(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        prompt = tuple(data["prompt"])
        answer = await engine.agenerate(ModelRequest(input_ids=prompt, sampling=SamplingParams(max_new_tokens=4)))
        n, m = len(prompt), len(answer.output_ids)
        return Trajectory(
            token_ids=prompt + answer.output_ids,
            loss_mask=(0,) * n + (1,) * m,
            behavior_logprobs=(0.0,) * n + answer.output_logprobs,
            versions=(-1,) * n + answer.output_versions,
            reward=float(answer.output_ids == data["answer"]),
        )


engine = ScriptedEngine(lambda request: [sum(request.input_ids)], version=3)
trajectory = asyncio.run(Guess().arun_episode(engine, {"prompt": [1, 2], "answer": (3,)}))
assert trajectory.reward == 1.0
assert trajectory.versions.tolist() == [-1, -1, 3]
assert engine.requests[0].sampling.max_new_tokens == 4

from arl.rollout.controller import run_examples
from arl.rollout.episode import EpisodeRunner

runner = EpisodeRunner(workflow=Guess(), timeout_s=5)
(episode,) = asyncio.run(run_examples(engine, runner, [{"prompt": [1, 2], "answer": (4,)}], max_concurrent=1))
assert episode.reward == 0.0
assert episode.error is None
assert not {"torch", "transformers"} & set(sys.modules), "a workflow's test must stay light"
"""


def test_a_workflow_is_written_and_tested_without_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", USERS_OWN_TEST], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
