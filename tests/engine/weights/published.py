"""A tiny trainer that checks the tokens which servers sampled against each of its versions."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from embedded_server import ServerProcess
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arl.api.engine import WeightGroup
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.engines import ClientConfig, OptimizerConfig, TrainConfig
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainSequence
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.snapshot import RankSnapshot
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer

PROMPT = (30, 40, 50, 60)


def write_model(directory: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """A Qwen3 of two layers whose next token is seldom nearly a tie; its vocabulary does not split evenly."""
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=46, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=800, initializer_range=0.3, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def towards_advantage(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
    return TokenLosses(loss=-outputs.logprobs * tokens.advantages)


def sequence(token_ids: Sequence[int], seed: int = 0) -> TrainSequence:
    """All but the first token trained, with random advantages."""
    count = len(token_ids)
    mask = torch.ones(count, dtype=torch.bool)
    mask[0] = False
    return TrainSequence(
        token_ids=torch.tensor(token_ids),
        loss_mask=mask,
        behavior_logprobs=torch.zeros(count),
        proximal_logprobs=torch.zeros(count),
        advantages=torch.randn(count, generator=torch.Generator().manual_seed(seed)),
        loss_weights=mask / (count - 1),
        versions=torch.zeros(count, dtype=torch.int64),
    )


@dataclass
class Trainee:
    """A train engine, and the weights of each of its versions as transformers runs them by itself."""

    engine: FSDPTrainEngine
    directory: Path
    twins: list[torch.nn.Module] = field(default_factory=list[torch.nn.Module])

    def __post_init__(self) -> None:
        self._keep_twin()

    def train(self) -> None:
        """One version more, of clearly other weights."""
        batch = [sequence(range(20 * i, 20 * i + 20), seed=self.engine.version) for i in range(3)]
        self.engine.train_batch([batch], towards_advantage)
        self._keep_twin()

    def _keep_twin(self) -> None:
        directory = self.directory / f"version-{self.engine.version}"
        self.engine.export(directory)
        twin = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        self.twins.append(twin.eval())

    @torch.no_grad()
    def logprobs(self, prompt_ids: Sequence[int], response: ModelResponse) -> torch.Tensor:
        """[versions, tokens]: of each token of the response under each version, all of its context under the same."""
        token_ids = torch.tensor([*prompt_ids, *response.output_ids])
        logits = torch.stack(
            [twin(input_ids=token_ids[None]).logits[0, len(prompt_ids) - 1 : -1] for twin in self.twins]
        )
        chosen = token_ids[len(prompt_ids) :].expand(len(self.twins), -1)[..., None]
        return torch.log_softmax(logits, dim=-1).gather(-1, chosen)[..., 0]

    def assert_of_its_versions(self, response: ModelResponse, seed: int = 0, upto: int | None = None) -> None:
        """Each of the first `upto` tokens after `prompt(seed)` has the trainer's logprob under its own version."""
        expected = self.logprobs(prompt(seed), response)
        for version, other in itertools.combinations(range(len(self.twins)), 2):
            assert (expected[version] - expected[other]).abs().max() > 0.1  # so that a wrong version would show
        own = expected[:, :upto].gather(0, torch.tensor(response.output_versions[:upto])[None])[0]
        torch.testing.assert_close(torch.tensor(response.output_logprobs[:upto]), own, rtol=1e-4, atol=1e-4)


@contextmanager
def trainee(model: Path, directory: Path) -> Iterator[Trainee]:
    torch.set_num_threads(1)
    engine = FSDPTrainEngine(model, TrainConfig(optimizer=OptimizerConfig(lr=1e-2, eps=1e-3)))
    try:
        yield Trainee(engine, directory)
    finally:
        engine.close()


class HookedEngine(ScriptedTrainEngine):
    """Takes the trainer's snapshots, which call `before_send(server's address, start)` before they send a range."""

    def __init__(self, trainer: Trainee) -> None:
        super().__init__()
        self.trainer = trainer
        self.before_send: Callable[[str, int], None] = lambda address, start: None
        self._servers: dict[str, str] = {}

    def snapshot(self) -> RankSnapshot:
        snapshot = self.trainer.engine.snapshot()
        open_group, send = snapshot.open_group, snapshot.send

        def note(server: str, *arguments: Any) -> WeightGroup:
            group = open_group(server, *arguments)
            self._servers[group.name] = server
            return group

        def hooked(group: str, start: int, stop: int) -> None:
            self.before_send(self._servers[group], start)
            send(group, start, stop)

        snapshot.open_group, snapshot.send = note, hooked
        return snapshot


def client(*servers: ServerProcess, version: int = 0, **settings: Any) -> RemoteInferenceEngine:
    config = ClientConfig(**{"request_timeout_s": 60.0, **settings})
    return RemoteInferenceEngine([server.address for server in servers], config, version=version)


def request(count: int, seed: int = 0) -> ModelRequest:
    """A request for `count` tokens after `prompt(seed)`."""
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=True, seed=seed)
    return ModelRequest(input_ids=prompt(seed), sampling=sampling)


def prompt(seed: int = 0) -> tuple[int, ...]:
    return (seed, *PROMPT)
