"""The embedded server on a GPU samples from the policy that the trainer on it computes, before and after a publish."""

from pathlib import Path

import pytest
import torch
from embedded_server import server_process
from engine.fsdp.train_models import MakeEngine
from engine.fsdp.train_sequences import LOSS, random_sequences

from arl.api.engine import WeightTransport
from arl.api.settings.engines import DiskWeightsConfig, DistributedWeightsConfig, LocalEngineConfig
from arl.api.train_engine import TrainSequence
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport
from arl.engine.weights.process_groups import WeightSender

PROMPT = [30, 40, 50, 60]


def assert_agrees(response: ModelResponse, engine: FSDPTrainEngine) -> None:
    tokens = torch.tensor([*PROMPT, *response.output_ids])
    sampled = torch.arange(len(tokens)) >= len(PROMPT)
    (logprobs,) = engine.forward([TrainSequence(token_ids=tokens, loss_mask=sampled)])
    torch.testing.assert_close(logprobs[sampled], torch.tensor(response.output_logprobs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("by", ["disk", "gloo", "nccl"])
async def test_the_server_agrees_with_the_trainer_after_a_publish(
    by: str, model_dir: Path, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if by == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two processes on one")
    if by == "gloo":
        monkeypatch.setattr(WeightSender, "backend", "gloo")
    transport: WeightTransport = DistributedTransport(DistributedWeightsConfig())
    if by == "disk":
        transport = DiskTransport(DiskWeightsConfig(directory=tmp_path / "weights"), tmp_path)
    sampling = SamplingParams(max_new_tokens=32, ignore_eos=True)
    engine, device = make_engine(device="cuda:0"), "cuda:1" if by == "nccl" else "cuda"
    with server_process(str(model_dir), "--device", device, "--context-length", "128") as server:
        async with RemoteInferenceEngine([server.address], LocalEngineConfig()) as client:
            assert_agrees(await client.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)), engine)
            engine.train_batch([random_sequences(6)], LOSS)
            await transport.deliver(transport.snapshot(engine), client)
            response = await client.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling))
            assert set(response.output_versions) == {1}
            assert_agrees(response, engine)
    transport.close()
