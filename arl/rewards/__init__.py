"""Ready-made rewards, and what makes a reward of a function. Each goes wherever a workflow takes a `reward`.

| module | holds |
|---|---|
| adapt | from a function to a reward: worker processes, threads, weighted sums |
| answers | exact and numeric match, tags, JSON, regular expressions, mathematics (math-verify) |
| gym | reasoning-gym's examples, and its own scorers for them |
| unit_tests | programs run against tests, in a sandbox |
| judge | a language model's score, over any OpenAI-compatible URL |

May import arl.api, arl.web and arl.sandbox; knows no workflow and no engine.
"""

from typing import TYPE_CHECKING

from arl.lazy import lazy_names

if TYPE_CHECKING:
    from arl.rewards.adapt import (
        AsyncReward,
        InlineReward,
        RewardPool,
        Score,
        ThreadReward,
        WeightedReward,
        as_reward,
    )
    from arl.rewards.answers import (
        ExactMatch,
        JsonFormat,
        MathEquality,
        NumericMatch,
        Tags,
        last_number,
        matches,
        math_reward,
    )
    from arl.rewards.gym import reasoning_gym_examples, reasoning_gym_reward
    from arl.rewards.judge import ChatServer, JudgeReward
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
    "arl.rewards.adapt": "AsyncReward InlineReward RewardPool Score ThreadReward WeightedReward as_reward",
    "arl.rewards.answers": "ExactMatch JsonFormat MathEquality NumericMatch Tags last_number matches math_reward",
    "arl.rewards.gym": "reasoning_gym_examples reasoning_gym_reward",
    "arl.rewards.judge": "ChatServer JudgeReward",
    "arl.rewards.unit_tests": "CallTests PrintTests UnitTestReport UnitTestsReward "
    "code_of run_unit_tests unit_tests_of",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]
