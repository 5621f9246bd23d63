"""The official fakes: an InferenceEngine made from a function, and a TrainEngine without weights.

ScriptedEngine is for testing workflows without a model, ScriptedTrainEngine for testing the flow without training.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import EngineClosedError
from arl.api.train_engine import ModelLimits, Output, Saving, Snapshot, TensorPrint, TokenLoss, TrainSequence
from arl.api.types import ModelRequest, ModelResponse

if TYPE_CHECKING:
    import torch

Script = Callable[[ModelRequest], "ModelResponse | Sequence[int] | Awaitable[ModelResponse | Sequence[int]]"]


class ScriptedEngine:
    """Answers every request by calling `script`, sync or async; bare token ids become a response of logprob -1.0.

    `requests` keeps every request. The script sees a grammar in `request.sampling`; its answer is not checked
    against it, and bare token ids count as sampled among the whole vocabulary. Tokens carry the version of the moment
    when their request began, and a paused engine starts no request, as with a real engine.
    """

    def __init__(self, script: Script, version: int = 0) -> None:
        self._script = script
        self._version = version
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self.requests: list[ModelRequest] = []

    @classmethod
    def saying(cls, tokenizer: Any, *texts: str) -> Self:
        """Plays a model that says these texts, one a turn; a further request is an AssertionError.

        tokenizer: a Hugging Face one, whose eos_token_id ends a turn.
        """
        left = iter(texts)

        def say(request: ModelRequest) -> list[int]:
            text = next(left, None)
            if text is None:
                raise AssertionError(f"the model was asked for another answer, but it was given only {len(texts)}")
            end = tokenizer.eos_token_id
            return [*tokenizer.encode(text, add_special_tokens=False), *([] if end is None else [end])]

        return cls(say)

    @property
    def version(self) -> int:
        return self._version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        await self._running.wait()
        if self._closed:
            raise EngineClosedError("agenerate was called on a closed ScriptedEngine")
        request = replace(request, input_ids=tuple(map(int, request.input_ids)))  # an array else, hard to compare
        self.requests.append(request)
        version = self._version
        answer = self._script(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, ModelResponse):
            return answer
        from arl.api.sampling_mask import KeptIds

        output_ids = tuple(answer)[: request.sampling.max_new_tokens]
        return ModelResponse(
            output_ids=output_ids,
            output_logprobs=(-1.0,) * len(output_ids),
            output_versions=(version,) * len(output_ids),
            stop_reason="length" if len(output_ids) == request.sampling.max_new_tokens else "stop",
            temperature=request.sampling.logprob_temperature,
            kept_ids=KeptIds.of([None] * len(output_ids)) if request.sampling.grammar else None,
        )

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        self._version = update.version
        return UpdateStats(pause_s=0.0, load_s=0.0)

    def counters(self) -> dict[str, float]:
        return {}

    async def aclose(self) -> None:
        self._closed = True
        self._running.set()


class ScriptedTrainEngine:
    """Counts batches instead of training. All logprobs are the behavior ones, and values are 0.

    `batches` keeps what was trained. on_train: called on the trainer's thread with each batch, to block, fail or look.
    limits: of the model that it plays.
    """

    def __init__(
        self,
        on_train: Callable[[Sequence[Sequence[TrainSequence]]], None] | None = None,
        limits: ModelLimits = ModelLimits(vocab_size=1 << 30),  # noqa: B008 - it is frozen
    ) -> None:
        self.limits = limits
        self._on_train = on_train
        self._version = 0
        self.batches: list[list[list[TrainSequence]]] = []
        self.kept: list[dict[str, torch.Tensor]] = []

    @property
    def version(self) -> int:
        return self._version

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[torch.Tensor]:
        return [s.values if output == "values" else s.behavior_logprobs for s in sequences]

    def update_reference(self, share: float = 1.0) -> None: ...

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        if self._on_train:
            self._on_train(minibatches)
        self.batches.append([list(minibatch) for minibatch in minibatches])
        self._version += 1
        return {"loss": 0.0}

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def fingerprint(self) -> dict[str, TensorPrint]:
        return {"version": TensorPrint(bits=self._version, norm=float(self._version), projection=float(self._version))}

    def snapshot(self) -> Snapshot:
        return _ScriptedSnapshot(version=self._version)

    def save(self, directory: Path) -> Saving:
        return _ScriptedSaving(directory=directory, version=self._version)

    def load(self, directory: Path) -> None:
        self._version = json.loads((directory / "engine.json").read_text())["version"]

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScriptedSnapshot:
    version: int

    def write(self, directory: Path) -> int:
        return _write(directory / "weights.json", self.version)

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScriptedSaving:
    directory: Path
    version: int

    def wait(self) -> None:
        _write(self.directory / "engine.json", self.version)


def _write(path: Path, version: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_text(json.dumps({"version": version}))
