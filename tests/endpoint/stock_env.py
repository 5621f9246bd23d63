"""An environment of verifiers for tests: its tool, which says what is in stock, is served to all rollouts."""

from collections.abc import Iterable

import verifiers.v1 as vf

STOCK = {"pears": 12, "plums": 30}


class StockTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def stock_of(self, fruit: str) -> str:
        """How many there are of a fruit."""
        return str(STOCK[fruit])


class StockData(vf.TaskData):
    answer: str


class StockTask(vf.Task[StockData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.assistant_messages[-1].content or ""))


class StockConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Stock(vf.Taskset[StockTask, StockConfig]):
    def load(self) -> Iterable[StockTask]:
        for fruit, number in STOCK.items():
            yield StockTask(StockData(prompt=f"How many {fruit} are there?", answer=str(number)), self.config.task)

    @classmethod
    def toolsets(cls, config: StockConfig) -> list[vf.Toolset]:
        return [StockTools(config.tools)]


__all__ = ["Stock"]

if __name__ == "__main__":
    StockTools.run()
