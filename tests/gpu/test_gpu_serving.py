"""The embedded server on a GPU samples from the policy that the trainer on it computes, before and after a publish."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from embedded_server import server_process
from engine.fsdp.train_models import MakeEngine
from engine.fsdp.train_sequences import LOSS, random_sequences

from arl.api.engine import WeightTransport
from arl.api.engine_config import DiskWeightsConfig, DistributedWeightsConfig, LocalEngineConfig
from arl.api.types import ModelRequest, ModelResponse, SamplingParams, TrainSequence
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport
from arl.engine.weights.sender import WeightSender

PROMPT = [30, 40, 50, 60]


@pytest.fixture
def server(model_dir: Path) -> Iterator[str]:
    with server_process(str(model_dir), "--device", "cuda", "--context-length", "128") as server:
        yield server.address


@pytest.fixture
def server_of_another_gpu(model_dir: Path) -> Iterator[str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two processes on one")
    with server_process(str(model_dir), "--device", "cuda:1", "--context-length", "128") as server:
        yield server.address


def assert_agrees(response: ModelResponse, engine: FSDPTrainEngine) -> None:
    tokens = [*PROMPT, *response.output_ids]
    sampled = torch.arange(len(tokens)) >= len(PROMPT)
    nothing = torch.zeros(len(tokens))
    sequence = TrainSequence(
        token_ids=torch.tensor(tokens),
        loss_mask=sampled,
        behavior_logprobs=nothing,
        proximal_logprobs=nothing,
        advantages=nothing,
        loss_weights=nothing,
        versions=torch.zeros(len(tokens), dtype=torch.int64),
    )
    (logprobs,) = engine.forward([sequence])
    torch.testing.assert_close(logprobs[sampled], torch.tensor(response.output_logprobs), rtol=1e-3, atol=1e-3)


async def sample_train_publish_sample(url: str, engine: FSDPTrainEngine, transport: WeightTransport) -> None:
    request = ModelRequest(input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=32, ignore_eos=True))
    async with RemoteSGLangEngine([url], LocalEngineConfig()) as client:
        assert_agrees(await client.agenerate(request), engine)
        engine.train_batch([random_sequences(6)], LOSS)
        await transport.deliver(transport.snapshot(engine), client)
        again = ModelRequest(input_ids=PROMPT, sampling=request.sampling)
        response = await client.agenerate(again)
        assert set(response.output_versions) == {1}
        assert_agrees(response, engine)
    transport.close()


async def test_the_server_agrees_with_the_trainer_after_a_publish_by_disk(
    server: str, make_engine: MakeEngine, tmp_path: Path
):
    transport = DiskTransport(DiskWeightsConfig(directory=tmp_path / "weights"), tmp_path)
    await sample_train_publish_sample(server, make_engine(), transport)


async def test_the_server_agrees_with_the_trainer_after_a_publish_by_gloo(
    server: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WeightSender, "backend", "gloo")  # nccl takes no two ranks on one GPU
    transport = DistributedTransport(DistributedWeightsConfig())
    await sample_train_publish_sample(server, make_engine(), transport)


async def test_the_server_agrees_with_the_trainer_after_a_publish_by_nccl(
    server_of_another_gpu: str, make_engine: MakeEngine
):
    transport = DistributedTransport(DistributedWeightsConfig())
    await sample_train_publish_sample(server_of_another_gpu, make_engine(device="cuda:0"), transport)
