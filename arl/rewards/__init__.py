"""Rewards: functions of an agent's answer and its example that return a number. Workflows take them as `reward`.

| module | what lives there |
|---|---|
| score | Score, and what all rewards share |
| adapt | as_reward, from_trl, WeightedReward, rewards on the event loop |
| pool, threads | blocking functions in worker processes, or in threads |
| answers | matches of text, numbers, choices, tags, JSON, regular expressions |
| mathematics | math-verify |
| scorers | reasoning-gym |
| unit_tests | code run against unit tests, in a sandbox (examiner: the program inside) |
| judge | a language model's score, over any OpenAI-compatible URL |

This package may import arl.api, arl.runtime and arl.sandbox, but no workflow and no engine.
"""

from typing import TYPE_CHECKING

from arl.runtime import lazy_names

if TYPE_CHECKING:
    from arl.rewards.adapt import AsyncReward, InlineReward, WeightedReward, as_reward, from_trl
    from arl.rewards.answers import (
        ChoiceMatch,
        ExactMatch,
        InTag,
        JsonFormat,
        NumericMatch,
        Tags,
        last_boxed,
        last_number,
        matches,
    )
    from arl.rewards.judge import ChatServer, JudgeReward
    from arl.rewards.mathematics import MathEquality, math_reward
    from arl.rewards.pool import RewardPool
    from arl.rewards.score import Score
    from arl.rewards.scorers import reasoning_gym_examples, reasoning_gym_reward
    from arl.rewards.threads import ThreadReward
    from arl.rewards.unit_tests import (
        CallTests,
        PrintTests,
        UnitTestReport,
        UnitTestsReward,
        code_of,
        run_unit_tests,
        unit_tests_of,
    )

_HOMES = {
    "arl.rewards.adapt": "AsyncReward InlineReward WeightedReward as_reward from_trl",
    "arl.rewards.answers": "ChoiceMatch ExactMatch InTag JsonFormat NumericMatch Tags last_boxed last_number matches",
    "arl.rewards.judge": "ChatServer JudgeReward",
    "arl.rewards.mathematics": "MathEquality math_reward",
    "arl.rewards.pool": "RewardPool",
    "arl.rewards.score": "Score",
    "arl.rewards.scorers": "reasoning_gym_examples reasoning_gym_reward",
    "arl.rewards.threads": "ThreadReward",
    "arl.rewards.unit_tests": "CallTests PrintTests UnitTestReport UnitTestsReward "
    "code_of run_unit_tests unit_tests_of",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]
