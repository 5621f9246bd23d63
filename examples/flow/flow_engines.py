"""The engines of a flow policy, as arl.launch takes them: what samples, what trains, and what brings the weights over.

A token is a denoising step. Row 0 of a trajectory is the prompt, with its noise x_1; row k is step k, with the point
that it reached. So row k's logprob is that of latents[k] given latents[k - 1], and arl needs no other rule.

    token_ids    prompt   8    9    10  ..         ids below 8 are prompts, 8 + k is step k
    latents      x_1      x    x    x   ..  x_0    float32[T + 1, 2]
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from flow_model import MAX_STEPS, NUM_PROMPTS, Velocity, step_entropy, step_logprobs, transition

import arl
from arl import extending

LATENTS = "latents"


# What samples --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Denoising:
    """A request under way."""

    x: torch.Tensor
    prompt: int
    num_steps: int
    noise_level: float
    draw: torch.Generator
    latents: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class FlowSampler:
    """An InferenceEngine: denoises all requests together, a step at a time, and takes new weights between two steps.

    A request's one token is its prompt, with the noise in arrays["latents"]; sampling.max_new_tokens are its steps, and
    sampling.temperature is the noise level a. A temperature of 0, as greedy episodes have, is the ODE.
    """

    address = "this process"

    def __init__(self) -> None:
        self._velocity = Velocity()
        self._version = 0
        self._due: list[_Denoising] = []
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._version

    async def agenerate(self, request: arl.ModelRequest) -> extending.ModelResponse:
        one = _begun(request)
        while len(one.latents) < one.num_steps:
            await self._next_step(one)
        return extending.ModelResponse(
            output_ids=tuple(range(NUM_PROMPTS, NUM_PROMPTS + one.num_steps)),
            output_logprobs=tuple(one.logprobs),
            output_versions=tuple(one.versions),
            stop_reason="length",
            temperature=request.sampling.logprob_temperature,
            arrays={LATENTS: torch.stack(one.latents).numpy()},
        )

    async def _next_step(self, one: _Denoising) -> None:
        self._due.append(one)
        try:
            await asyncio.sleep(0)  # every other request becomes due, too
            await self._running.wait()
            if self._is_closed:
                raise extending.EngineClosedError("the flow sampler was closed")
        except BaseException:
            if one in self._due:
                self._due.remove(one)
            raise
        if one in self._due:  # the first that goes on takes all of them a step further
            due, self._due = self._due, []
            self._step(due)

    @torch.no_grad()
    def _step(self, due: Sequence[_Denoising]) -> None:
        """A large model would compute this in a thread, or in servers: the event loop waits for it."""
        x = torch.stack([one.x for one in due])
        a = torch.tensor([one.noise_level for one in due])
        prompts, steps, num_steps = (
            torch.tensor(row)
            for row in zip(*((one.prompt, len(one.latents), one.num_steps) for one in due), strict=True)
        )
        mean, std = transition(self._velocity, x, prompts, steps, num_steps, a)
        reached = mean + std[:, None] * torch.stack([torch.randn(2, generator=one.draw) for one in due])
        logprobs = step_logprobs(reached, mean, std).tolist()
        for one, point, logprob in zip(due, reached, logprobs, strict=True):
            one.x = point
            one.latents.append(point)
            one.logprobs.append(logprob)
            one.versions.append(self._version)

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, update: extending.WeightUpdate) -> extending.UpdateStats:
        """The sampler is its own only server."""
        if update.version < self._version:
            raise ValueError(f"the sampler holds version {self._version}, and was given version {update.version}")
        began, server = time.monotonic(), cast("extending.WeightServer", self)
        await update.prepare(server)
        await update.load(server, flush_cache=False)
        return extending.UpdateStats(pause_s=0.0, load_s=time.monotonic() - began)

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        """Requests go on with the new weights at their next step."""
        velocity = await asyncio.to_thread(Velocity().read, directory)
        self._velocity, self._version = velocity, version

    def counters(self) -> dict[str, float]:
        return {"denoising": float(len(self._due))}

    async def aclose(self) -> None:
        self._is_closed = True
        self._running.set()


def _begun(request: arl.ModelRequest) -> _Denoising:
    """Raises ValueError for what this sampler cannot honour."""
    sampling = request.sampling
    plain = arl.SamplingParams(
        max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, seed=sampling.seed
    )
    if sampling != plain:
        raise ValueError(f"a flow policy takes max_new_tokens, temperature and seed alone, not {sampling}")
    if sampling.max_new_tokens > MAX_STEPS:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}; a flow policy takes at most {MAX_STEPS} steps")
    (prompt,), (noise,) = request.input_ids, request.arrays[LATENTS]
    draw = torch.Generator()
    draw.manual_seed(sampling.seed) if sampling.seed is not None else draw.seed()
    x = torch.tensor(noise, dtype=torch.float32)
    return _Denoising(x, int(prompt), sampling.max_new_tokens, sampling.temperature, draw)


# What trains ---------------------------------------------------------------------------------------------------------


class FlowTrainEngine:
    """A TrainEngine, in the trainer's process. Minibatches are small, so each is one microbatch."""

    def __init__(self, model: str, settings: arl.TrainConfig, *, seed: int, head: extending.Head) -> None:
        """An extending.TrainEngineLoader. seed: unused, as nothing here is random."""
        _check(settings, head)
        torch.set_num_threads(settings.num_threads)
        self._velocity = Velocity().read(model)
        self._reference: Velocity | None = None
        self._settings = settings.optimizer
        options: Any = settings.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"})
        parameters = [*self._velocity.parameters()]
        biases = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
        self._optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.ndim > 1]}, biases], **options)
        self.version = 0
        self.kept: list[dict[str, torch.Tensor]] = []

    @property
    def limits(self) -> extending.ModelLimits:
        return extending.ModelLimits(vocab_size=NUM_PROMPTS + MAX_STEPS, arrays=frozenset({LATENTS}))

    def forward(
        self, sequences: Sequence[extending.TrainSequence], output: extending.Output = "logprobs"
    ) -> list[torch.Tensor]:
        if output == "values" or (output == "reference_logprobs" and self._reference is None):
            raise extending.ConfigError(f"a flow policy has no {output} here")
        velocity = self._reference if output == "reference_logprobs" else self._velocity
        with torch.no_grad():
            return extending.unpacked(outputs_of(cast("Velocity", velocity), sequences).logprobs, sequences)

    def update_reference(self, share: float = 1.0) -> None:
        if self._reference is None:
            self._reference = copy.deepcopy(self._velocity)
        with torch.no_grad():
            for ours, current in zip(self._reference.parameters(), self._velocity.parameters(), strict=True):
                ours.lerp_(current, share)

    def train_batch(
        self, minibatches: Sequence[Sequence[extending.TrainSequence]], loss: extending.TokenLoss
    ) -> dict[str, float]:
        report, self.kept = extending.LossReport(), []
        for minibatch in minibatches:
            tokens = extending.packed_tokens(minibatch)
            losses = loss(outputs_of(self._velocity, minibatch), tokens)
            self._optimizer.zero_grad()
            (losses.loss * tokens.loss_weights).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(
                self._velocity.parameters(), self._settings.max_grad_norm, error_if_nonfinite=True
            )
            if len(tokens.advantages):  # without trained steps, momentum alone would move the weights
                self._optimizer.step()
            report.add(losses, tokens)
            report.end_minibatch(grad_norm=float(norm), lr=self._settings.lr)
            nan = float("nan")
            self.kept.append({n: torch.cat(extending.unpacked(v, minibatch, nan)) for n, v in losses.kept.items()})
        self.version += 1
        return report.metrics

    def offload(self) -> None:
        """Only servers that share a GPU with the trainer need this."""

    def onload(self) -> None: ...

    def fingerprint(self) -> dict[str, extending.TensorPrint]:
        return {name: _print_of(tensor) for name, tensor in self._velocity.state_dict().items()}

    def snapshot(self) -> FlowSnapshot:
        return FlowSnapshot(self.version, copy.deepcopy(self._velocity))

    def save(self, directory: Path) -> FlowSaving:
        modules = {"velocity": self._velocity, "optimizer": self._optimizer, "reference": self._reference}
        state = {name: module.state_dict() for name, module in modules.items() if module is not None}
        return FlowSaving(directory, copy.deepcopy(state) | {"version": self.version})

    def load(self, directory: Path) -> None:
        try:
            state = torch.load(directory / "engine.pt", weights_only=True)
            self._velocity.load_state_dict(state["velocity"])
            self._optimizer.load_state_dict(state["optimizer"])
            if "reference" in state:
                self.update_reference()
                cast("Velocity", self._reference).load_state_dict(state["reference"])
            self.version = state["version"]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise extending.CheckpointError(f"{directory} holds no flow policy of this size: {error}") from error

    def close(self) -> None: ...


def _check(settings: arl.TrainConfig, head: extending.Head) -> None:
    """Raise ConfigError for what this engine cannot honour."""
    if head != "policy":
        raise extending.ConfigError(f"a flow policy has no critic; leave out what asks for a head of kind {head}")
    honoured = {"optimizer", "num_threads", "max_recoveries"}
    plain = arl.TrainConfig(**settings.model_dump(include=honoured))
    if others := [name for name in arl.TrainConfig.model_fields if getattr(settings, name) != getattr(plain, name)]:
        raise extending.ConfigError(
            f"train.{others[0]} is set, and a flow policy takes {', '.join(sorted(honoured))} alone; leave it out"
        )
    if settings.optimizer.schedule != "constant" or settings.optimizer.warmup_steps:
        raise extending.ConfigError("a flow policy is trained with a constant learning rate")


def outputs_of(velocity: Velocity, sequences: Sequence[extending.TrainSequence]) -> extending.TokenOutputs:
    """The logprobs of the trained steps under these weights, in the order of extending.packed_tokens."""
    x, reached, prompts, steps, num_steps, a = (
        torch.cat(column) for column in zip(*map(_trained_steps, sequences), strict=True)
    )
    mean, std = transition(velocity, x, prompts, steps, num_steps, a)
    logprobs = step_logprobs(reached, mean, std)
    return extending.TokenOutputs(logprobs=logprobs, entropy=step_entropy(std), values=torch.zeros_like(logprobs))


def _trained_steps(sequence: extending.TrainSequence) -> tuple[torch.Tensor, ...]:
    """x, the point reached, prompt, step, num_steps and noise level of each trained step."""
    latents = torch.tensor(sequence.arrays[LATENTS])
    rows = sequence.loss_mask.nonzero()[:, 0]
    prompts, num_steps = sequence.token_ids[:1].expand(len(rows)), torch.full_like(rows, len(sequence) - 1)
    a = torch.full((len(rows),), sequence.temperature)
    return latents[rows - 1], latents[rows], prompts, sequence.token_ids[rows] - NUM_PROMPTS, num_steps, a


def _print_of(tensor: torch.Tensor) -> extending.TensorPrint:
    """Of its bytes: this engine has one rank, so no sums over ranks have to agree."""
    digest = hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).digest()
    signs = torch.arange(tensor.numel()).bitwise_and(1).mul(2).sub(1).double()
    flat = tensor.double().flatten()
    return extending.TensorPrint(bits=int.from_bytes(digest), norm=float(flat.norm()), projection=float(flat @ signs))


@dataclass(frozen=True)
class FlowSnapshot:
    """A copy of one version's weights."""

    version: int
    velocity: Velocity

    def write(self, directory: Path) -> int:
        return self.velocity.write(directory)

    def release(self) -> None:
        """Nothing holds it any longer than its owner does."""


@dataclass(frozen=True)
class FlowSaving:
    """A checkpoint, copied already. `wait` writes it, on a thread beside training."""

    directory: Path
    state: dict[str, Any]

    def wait(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        torch.save(self.state, self.directory / "engine.pt")


# What brings the weights over ----------------------------------------------------------------------------------------


class FileUpdate:
    """A WeightUpdate: the trainer's process writes the snapshot to a directory, and the sampler reads it."""

    adapter = None

    def __init__(self, snapshot: extending.Snapshot, directory: Path) -> None:
        self.version, self.num_bytes = snapshot.version, 0
        self._snapshot, self._directory = snapshot, directory

    async def prepare(self, server: extending.WeightServer) -> None:
        self.num_bytes = await asyncio.to_thread(self._snapshot.write, self._directory)

    async def load(self, server: extending.WeightServer, *, flush_cache: bool) -> None:
        await server.load_directory(self._directory, version=self.version, flush_cache=flush_cache)

    def discard(self) -> None:
        self._snapshot.release()
        shutil.rmtree(self._directory, ignore_errors=True)


class FileTransport:
    """A WeightTransport over a directory that both processes see."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="flow-weights-")

    def snapshot(self, engine: extending.WeightSource) -> FileUpdate:
        snapshot = engine.snapshot()
        return FileUpdate(snapshot, Path(self._home.name) / f"version-{snapshot.version}")

    async def deliver(self, update: extending.WeightUpdate, engine: extending.InferenceEngine) -> extending.UpdateStats:
        try:
            return await engine.update_weights(update)
        finally:
            self.discard(update)

    def discard(self, update: extending.WeightUpdate) -> None:
        cast("FileUpdate", update).discard()

    def close(self) -> None:
        self._home.cleanup()


def flow_engines() -> extending.OwnEngines:
    """For one run."""
    return extending.OwnEngines(inference=FlowSampler(), train=FlowTrainEngine, transport=FileTransport())
