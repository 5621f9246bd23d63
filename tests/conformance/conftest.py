"""Each test runs against the embedded server (in `make test`), and against stock SGLang (in `make test-sglang`).

Tests of arl's own client also run against stock vLLM (in `make test-vllm`), whose protocol is another.
"""

import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
import torch
from adapter_files import write_adapter
from embedded_server import server_here, server_process
from mixtures import write_mixture
from protocol_client import Client
from reference import Reference
from servers import Server, VLLMWatch, python_of, stock
from sighted import SEEING_WIDE, WIDE_VISION, write_sighted
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from arl.api.settings.engines import TrainConfig
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model
from arl.run.finetuning import warm_starts

CONTEXT_LENGTH = 8192
# Weights so large that the next token is seldom nearly a tie, and that other weights say something else.
SHAPE = TinyShape(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    context_length=CONTEXT_LENGTH, initializer_range=0.3,
)  # fmt: skip


OPTIONS = {
    "sglang-reward": ("--is-embedding",),
    "sglang-mixture": ("--enable-return-routed-experts",),
    "sglang-lora": (
        "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8", "--lora-target-modules", "all",
    ),
    "vllm-lora": ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4"),
}  # fmt: skip
ON_EACH_KIND = pytest.mark.parametrize(
    "server",
    [
        "embedded",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300)]),
    ],
    indirect=True,
)
"""For tests that speak to a server by arl's client alone."""


@dataclass(frozen=True)
class Models:
    """Two sets of weights of one architecture: their directories, what transformers says of them, their tokenizer."""

    directory_a: Path
    directory_b: Path
    a: Reference
    b: Reference
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_models(root: Path, shape: TinyShape) -> Models:
    a, b = (write_tiny_model(root / name, shape=shape, seed=seed) for seed, name in enumerate(("a", "b")))
    return Models(a, b, Reference(a), Reference(b), tiny_tokenizer())


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("models"), SHAPE)


@pytest.fixture(scope="session")
def wide_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """vLLM's attention on a CPU takes no heads of 16."""
    return write_models(tmp_path_factory.mktemp("wide"), replace(SHAPE, head_dim=32))


@pytest.fixture
def served(server: Server, request: pytest.FixtureRequest) -> Models:
    """The models that this server can serve."""
    return request.getfixturevalue("wide_models" if server.kind == "vllm" else "models")


@pytest.fixture(scope="session")
def math_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The math agent's model after a short warm start: it answers a part of the questions."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agents"))
    import math_agent
    import math_tasks

    directory = tmp_path_factory.mktemp("math") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_tasks, "NUM_CAREFUL", 5000)
        patch.setattr(math_tasks, "NUM_MIXED", 1000)
        # Two threads wait for each other at every matmul where other processes want the cores too.
        patch.setattr(warm_starts, "TrainConfig", lambda **settings: TrainConfig(**{**settings, "num_threads": 1}))
        return math_agent.tiny_model(directory, math_tasks.held_out(192), seed=0)


def write_reward_model(directory: Path, seed: int) -> Path:
    """A Llama: stock SGLang computes its scores as transformers does, but adds a constant to those of a Qwen3."""
    vocabulary = tiny_tokenizer().get_vocab()
    config = LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.3, num_labels=1,
        eos_token_id=vocabulary["<|im_end|>"], pad_token_id=vocabulary["<|endoftext|>"], bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward") / "model", 0)


@pytest.fixture(scope="session")
def mixture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe")


@pytest.fixture(scope="session")
def qwen2_5_vl_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sighted(
        tmp_path_factory.mktemp("sighted") / "qwen2_5_vl", "qwen2_5_vl", shape=SEEING_WIDE, vision=WIDE_VISION
    )


@pytest.fixture(scope="session")
def qwen3_vl_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sighted(
        tmp_path_factory.mktemp("sighted") / "qwen3_vl", "qwen3_vl", shape=SEEING_WIDE, vision=WIDE_VISION
    )


def write_adapters(root: Path, models: Models) -> Path:
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, models.directory_a, seed, merged=root / f"merged-{name}")
    return root


@pytest.fixture(scope="session")
def written(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), models)


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server at a time: stock SGLang keeps a core busy.

    A test can ask for `vllm`; for `sglang-math`, which serves math_model, `embedded-reward` and `sglang-reward`:
    reward_model, `embedded-mixture` and `sglang-mixture`: mixture_model, models that see by their family, as in
    `sglang-qwen3_vl`, or `sglang-lora` and `vllm-lora`, which take adapters.
    """
    kind, _, other = request.param.partition("-")
    if kind != "embedded":
        python_of(kind)
    is_own = other in ("", "lora")
    if kind == "vllm":
        models = request.getfixturevalue("wide_models")
    model = models.directory_a if is_own else request.getfixturevalue(f"{other}_model")
    limit = ("--context-length", str(CONTEXT_LENGTH if is_own else 1024))
    if kind != "embedded":
        if kind == "vllm":
            limit = ("--max-model-len", limit[1])
        log = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
        with stock(kind, model, log, *limit, *OPTIONS.get(request.param, ())) as running:
            yield running
    elif other == "reward":
        with server_here(str(model), *limit) as url:
            yield Server("embedded", url)
    else:  # a process, because a trainer and its server cannot be in one
        with server_process(str(model), *limit) as process:
            yield Server("embedded", process.address)


@pytest.fixture
async def client(server: Server, models: Models, request: pytest.FixtureRequest) -> AsyncIterator[Client | VLLMWatch]:
    """A client of the server, which afterwards runs again, idle, with weights a under the label `a`."""
    async with aiohttp.ClientSession(server.url) as session:
        if server.kind == "vllm":
            await (watch := VLLMWatch(session)).hold(request.getfixturevalue("wide_models").directory_a, "a")
            yield watch
            return
        client = Client(session)
        if (await client.get("/model_info")).body["weight_version"] != "a":
            await client.post(
                "/update_weights_from_disk", {"model_path": str(models.directory_a), "weight_version": "a"}
            )
        yield client
        await client.post("/continue_generation")
        await client.post("/pause_generation", {"mode": "abort"})
        await client.post("/continue_generation")
        await client.until_waiting(0)
        await client.until_running(0)
        await client.post("/update_weights_from_disk", {"model_path": str(models.directory_a), "weight_version": "a"})
