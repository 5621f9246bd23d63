"""How routing replay narrows the gap between a sampler in bfloat16 and the trainer, on a tiny mixture of experts.

    python benchmarks/routing_replay.py --sglang-python .venv-sglang/bin/python

Each server samples the same prompts from the same model. The trainer computes the logprobs of the sampled tokens, with
the server's routes and with its own. Without --sglang-python only the embedded server is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from arl.api.settings.engines import TrainConfig
from arl.api.settings.run import Config
from arl.api.train_engine import TrainSequence
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import Family, TinyShape, write_tiny_model
from arl.run.servers import connect, open_servers

ARGUMENTS = Path(__file__).parents[1] / "scripts" / "sglang_cpu" / "arguments"
SHAPE = TinyShape(num_layers=6, num_experts=32, experts_per_token=4, initializer_range=0.1)
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 60, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far the trainer's logprobs are from the sampler's, over all sampled tokens."""

    mean: float
    largest: float
    kl: float
    """The mean of exp(d) - 1 - d with d = trainer's less sampler's: Schulman's k3, in nats a token."""
    token_share: float
    """Effective sample size of the tokens' ratios, as a share of their number."""
    sequence_share: float
    """The same of whole responses' ratios."""

    @classmethod
    def of(cls, trainers: torch.Tensor, samplers: torch.Tensor) -> Gap:
        """[responses, tokens] each."""
        d = (trainers - samplers).double()
        return cls(
            mean=d.abs().mean().item(),
            largest=d.abs().max().item(),
            kl=(d.exp() - 1 - d).mean().item(),
            token_share=effective_share(d.exp().flatten()),
            sequence_share=effective_share(d.sum(1).exp()),
        )


def effective_share(weights: torch.Tensor) -> float:
    return (weights.sum() ** 2 / weights.square().sum() / len(weights)).item()


async def sampled(config: Config, prompts: Sequence[Sequence[int]]) -> list[ModelResponse]:
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    async with AsyncExitStack() as stack:
        opened = await open_servers(config, stack, config.run_dir / "logs")
        engine = await stack.enter_async_context(await connect(config, opened))
        requests = [ModelRequest(input_ids=prompt, sampling=sampling) for prompt in prompts]
        return list(await asyncio.gather(*map(engine.agenerate, requests)))


def gap_of(
    model: Path, dtype: Any, prompts: Sequence[Sequence[int]], said: Sequence[ModelResponse], *, replays: bool
) -> Gap:
    sequences: list[TrainSequence] = []
    for prompt, response in zip(prompts, said, strict=True):
        token_ids = torch.tensor([*prompt, *response.output_ids])
        mask = torch.arange(len(token_ids)) >= len(prompt)
        routes = response.routes if replays else None
        sequences.append(TrainSequence(token_ids=token_ids, loss_mask=mask, routes=routes))
    engine = FSDPTrainEngine(model, TrainConfig(dtype=dtype))
    try:
        rows = engine.forward(sequences)
    finally:
        engine.close()
    trainers = torch.stack([row[s.loss_mask] for row, s in zip(rows, sequences, strict=True)])
    return Gap.of(trainers, torch.tensor([response.output_logprobs for response in said]))


def engines(sglang_python: str | None) -> dict[str, dict[str, Any]]:
    """Name -> settings of `engine`."""
    found: dict[str, dict[str, Any]] = {
        f"embedded, {dtype}": {"kind": "local", "dtype": dtype} for dtype in ("float32", "bfloat16")
    }
    for dtype in ("float32", "bfloat16") if sglang_python else ():
        arguments = ARGUMENTS.read_text().replace("--dtype float32", f"--dtype {dtype}").split()
        options = {"kind": "sglang_processes", "python": sglang_python, "gpus_per_server": 0}
        found[f"SGLang, {dtype}"] = {**options, "arguments": [*arguments, "--context-length", "400"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=get_args(Family)[1:], default="qwen3_moe")
    parser.add_argument("--sglang-python", help="the interpreter that has SGLang")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    print("| server | trainer | replay | mean | largest | KL | tokens | responses |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch, "model"), shape=SHAPE, family=args.family)
        for number, (name, settings) in enumerate(engines(args.sglang_python).items()):
            run_dir = Path(scratch, str(number))
            run_dir.mkdir()
            config = Config.model_validate({"model": str(model), "run_dir": run_dir, "engine": settings})
            said = asyncio.run(sampled(config, prompts))
            for dtype in ("float32", "bfloat16"):
                for replays in (False, True):
                    gap = gap_of(model, dtype, prompts, said, replays=replays)
                    print(
                        f"| {name} | {dtype} | {'yes' if replays else 'no'} | {gap.mean:.1e} | {gap.largest:.1e} "
                        f"| {gap.kl:.1e} | {gap.token_share:.4f} | {gap.sequence_share:.3f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
