"""Environments made with OpenEnv's own classes, on a port: `openenv_server.py PORT guess|garden`.

guess: find a number from hints; the action has one field. garden: the same by MCP tools. A guess of 13 hangs, 666 is a
bug of the environment's, and 999 ends the server.
"""

import os
import random
import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


def hint(guess: int, secret: int) -> str:
    match guess:
        case 13:
            time.sleep(600)
        case 666:
            raise RuntimeError("the dice are lost")
        case 999:
            os._exit(1)
    return "right" if guess == secret else ("higher" if guess < secret else "lower")


class GuessEnvironment(Environment):
    """The seed is the number. A wrong guess costs 0.25, the right one brings 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0
        self._state = State()

    def reset(self, seed=None, episode_id=None, **_) -> Hint:
        self._secret = random.randrange(10) if seed is None else seed
        self._state = State(episode_id=episode_id)
        return Hint(text="Guess a number below ten.")

    def step(self, action: Guess, timeout_s=None, **_) -> Hint:
        self._state.step_count += 1
        said = hint(action.number, self._secret)
        is_right = said == "right"
        return Hint(text=said, reward=1.0 if is_right else -0.25, done=is_right)

    @property
    def state(self) -> State:
        return self._state


class GardenEnvironment(MCPEnvironment):
    """The same, as a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("garden")
        self._secret, self._last = 0, ""

        @server.tool
        def dig(number: int) -> str:
            """Dig at a place, to find the treasure."""
            self._last = hint(number, self._secret)
            return self._last

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_) -> Observation:
        self._secret, self._last = seed, ""
        return Observation()

    def _step_impl(self, action, timeout_s=None, **_) -> Observation:
        raise ValueError("this environment takes only calls")

    async def step_async(self, action, timeout_s=None, **_) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s)
        if isinstance(action, CallToolAction) and isinstance(seen, CallToolObservation) and seen.error is None:
            seen.done = self._last == "right"
            seen.reward = float(seen.done)
        return seen

    @property
    def state(self) -> State:
        return State()


APPS = {
    "guess": lambda: create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=2),
    "garden": lambda: create_fastapi_app(GardenEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=8),
}

if __name__ == "__main__":
    uvicorn.run(APPS[sys.argv[2]](), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
