"""What forwarding shared prefixes once is worth: training steps of the same batches with it and without.

    python benchmarks/packing.py --rounds 5

A step is one `train_batch` (packing, forward, backward, AdamW) of the train engine on a CPU. Engines with and without
`train.share_prefixes` take turns on one thread, and of several rounds the best of each counts, in CPU seconds. Tokens
are those of the sequences, whether they are forwarded or not, so tokens/s compare what is trained.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.prefix_tree import prefix_order
from arl.api.settings.algorithm import preset
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import TinyShape, write_tiny_model

VOCABULARY = 256
SHAPE = TinyShape(num_layers=4)
"""Of the quickstart's model."""


@dataclass(frozen=True)
class Workload:
    """Groups of episodes that begin with one prompt; an episode is turns of sampled tokens and the answers to them.

    branches: how many last turns each episode has; all but one of its turns are then shared among them.
    """

    groups: int
    group_size: int
    prompt: int
    turns: int
    sampled: int
    observed: int
    branches: int = 1

    def sequences(self) -> list[TrainSequence]:
        generator = torch.Generator().manual_seed(0)
        built: list[TrainSequence] = []
        for _ in range(self.groups):
            prompt = _tokens(self.prompt, generator)
            for _ in range(self.group_size):
                built += self._episode(prompt, generator)
        return weigh_tokens(built)

    def _episode(self, prompt: torch.Tensor, generator: torch.Generator) -> Iterator[TrainSequence]:
        tokens, mask = [prompt], [torch.zeros(len(prompt))]
        for _ in range(self.turns - 1):
            sampled, observed = _about(self.sampled, generator), self.observed
            tokens.append(_tokens(sampled + observed, generator))
            mask += [torch.ones(sampled), torch.zeros(observed)]
        for _ in range(self.branches):
            last = _tokens(_about(self.sampled, generator), generator)
            yield _sequence(torch.cat([*tokens, last]), torch.cat([*mask, torch.ones(len(last))]).bool(), generator)


WORKLOADS = {
    "short answers: groups of 16, prompt 18, answer 3": Workload(8, 16, 18, 1, 3, 0),
    "math agent: groups of 8, prompt 60, 3 turns of 16": Workload(8, 8, 60, 3, 16, 8),
    "no shared prefix: 64 sequences of about 120": Workload(64, 1, 60, 3, 16, 8),
    "short prompt: groups of 8, prompt 20, answer 40": Workload(8, 8, 20, 1, 40, 0),
    "long prompt: groups of 8, prompt 1024, answer 64": Workload(2, 8, 1024, 1, 64, 0),
    "branched: 4 last turns after 5 shared, prompt 100": Workload(2, 2, 100, 6, 40, 20, branches=4),
}


def _tokens(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=generator)


def _about(count: int, generator: torch.Generator) -> int:
    """Between half and one and a half times count: responses differ in length."""
    return count // 2 + int(torch.randint(0, count + 1, (1,), generator=generator))


def _sequence(tokens: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> TrainSequence:
    logprobs = -3 * torch.rand(len(tokens), generator=generator) * mask
    return TrainSequence(
        token_ids=tokens,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        proximal_logprobs=logprobs,
        advantages=torch.randn(1, generator=generator) * mask,
        loss_weights=torch.zeros(len(tokens)),
        versions=torch.zeros(len(tokens), dtype=torch.int64),
    )


def step_s(engine: FSDPTrainEngine, sequences: list[TrainSequence], loss: PolicyLoss) -> tuple[float, dict[str, float]]:
    started = time.process_time()
    metrics = engine.train_batch([sequences], loss)
    return time.process_time() - started, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=8192, help="train.max_tokens_per_microbatch")
    options = parser.parse_args()
    loss = PolicyLoss.of(preset("decoupled_ppo"))

    table = Table("sequences", "tokens", "forwarded", "filled", "apart tok/s", "shared tok/s", "ratio", "tree ms")
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "model", shape=SHAPE)

        def engine(share_prefixes: bool) -> FSDPTrainEngine:
            config = TrainConfig(
                share_prefixes=share_prefixes,
                max_tokens_per_microbatch=options.budget,
            )
            return FSDPTrainEngine(model, config)

        with closing(engine(False)) as apart, closing(engine(True)) as shared:
            for name, workload in WORKLOADS.items():
                sequences = workload.sequences()
                tree_s = min(_tree_s(sequences) for _ in range(options.rounds))
                times: dict[bool, list[float]] = {False: [], True: []}
                metrics: dict[str, float] = {}
                for _ in range(options.rounds + 1):  # the first warms up, and seldom is the best
                    times[False].append(step_s(apart, sequences, loss)[0])
                    seconds, metrics = step_s(shared, sequences, loss)
                    times[True].append(seconds)
                slow, fast = min(times[False]), min(times[True])
                table.add_row(
                    name,
                    f"{metrics['tokens']:,.0f}",
                    f"{metrics['forwarded_share']:.1%}",
                    f"{metrics['packing_efficiency']:.1%}",
                    f"{metrics['tokens'] / slow:,.0f}",
                    f"{metrics['tokens'] / fast:,.0f}",
                    f"{slow / fast:.2f}",
                    f"{1000 * tree_s:.1f}",
                )
    Console(width=140).print(table)


def _tree_s(sequences: list[TrainSequence]) -> float:
    started = time.process_time()
    prefix_order(sequences)
    return time.process_time() - started


if __name__ == "__main__":
    main()
