"""Rewards, off the event loop. In a workflow each is one await: `score = await self.reward(answer, data)`.

| class | for | time limit | a call costs |
|---|---|---|---|
| RewardPool | any synchronous function; it may hang, crash or run long | kills the worker | a round trip to a process |
| ThreadReward | a synchronous one that no worker can import, as in a notebook | stops its Python code | a thread |
| AsyncReward | a coroutine function, such as a call to a judge model | cancels it | itself |
| InlineReward | a trivial one, such as comparing two strings | none | itself, on the event loop |

`as_reward` chooses among them for a function, and takes whatever is a reward already; `WeightedReward`
adds several up by name. Results must be finite numbers,
or Scores of such. A slow reward makes a slow episode, and nothing else waits for it.

Ready-made ones are in arl.rewards.
"""

from arl.rewards.adapt import RewardLike, WorkflowReward, as_reward
from arl.rewards.direct import AsyncReward, InlineReward
from arl.rewards.pool import RewardPool
from arl.rewards.score import Reward, Score, score_of
from arl.rewards.thread import ThreadReward
from arl.rewards.weighted import WeightedReward

__all__ = [
    "AsyncReward",
    "InlineReward",
    "Reward",
    "RewardLike",
    "RewardPool",
    "Score",
    "ThreadReward",
    "WeightedReward",
    "WorkflowReward",
    "as_reward",
    "score_of",
]
