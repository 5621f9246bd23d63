"""What models of many kinds hold besides parameters of one tensor each: servers of other weights get all of it."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import reference_logits, write_family
from embedded_server import server_process
from loaders import Receiver, Servers, mirror_here
from published import Trainee, client, request, sequence, towards_advantage, trainee
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from arl.api.settings.engines import (
    DeltaWeightsConfig,
    DiskWeightsConfig,
    DistributedWeightsConfig,
    OptimizerConfig,
    TrainConfig,
)
from arl.engine.fsdp.model import ModelWriter, load_model
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.local.runner import ModelRunner, StepInput
from arl.engine.local.slot_attention import Chunk
from arl.engine.local.weight_receiver import WeightsError, check_fit, read_directory
from arl.engine.model_files import load_tokenizer
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport, torch_dtype

TOKENS = (5, 80, 7, 120, 9, 200, 11, 40)


class Served(Receiver):
    """The weights of an embedded server in this process."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.runner = ModelRunner(str(directory), device="cpu", dtype="float32", max_rows=2, context_length=64)
        self.form = self.runner.stored_form

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        check_fit(tensors, self.form.shapes)
        self.runner.load(self.form.parameters(tensors))

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        self.take(read_directory(str(directory), self.form.shapes, self.form.tied))

    async def end_update(self) -> None:
        self.take(self.tensors)
        self.tensors = {}

    def logits(self) -> torch.Tensor:
        places = range(len(TOKENS))
        chunk = Chunk(row=0, start=0, length=len(TOKENS))
        return self.runner.forward(StepInput(token_ids=TOKENS, positions=places, chunks=[chunk]))[0]


@pytest.mark.parametrize(
    "family", ["apertus", "deepseek_v3", "exaone_moe", "gpt_oss", "llama4_text", "minimax_m2", "qwen3_next"]
)
async def test_each_transport_brings_persistent_buffers_and_fused_experts(family: str, tmp_path: Path):
    source, other = write_family(family, tmp_path / "source"), write_family(family, tmp_path / "other", seed=1)
    expected = reference_logits(AutoModelForCausalLM.from_pretrained(source).eval(), [TOKENS])[0]
    server = Served(other)
    directory = tmp_path / "weights"
    async with mirror_here(tmp_path / "mirror") as mirror:
        with trainee(source, tmp_path) as trainer:
            delta = DeltaWeightsConfig(mirrors={server.address: mirror.address}, directory=directory)
            for transport in (
                DiskTransport(DiskWeightsConfig(directory=directory), tmp_path),
                DeltaTransport(delta, tmp_path),
                DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000),
            ):
                await server.load_directory(other, version=0, flush_cache=True)
                assert (server.logits() - expected).abs().max() > 0.1
                with closing(transport):
                    await publish(transport, trainer, server)
                torch.testing.assert_close(server.logits(), expected, rtol=1e-4, atol=1e-4)


async def test_a_server_process_of_other_weights_takes_a_mixture_by_broadcast(tmp_path: Path):
    source, other = write_family("glm4_moe", tmp_path / "source"), write_family("glm4_moe", tmp_path / "other", seed=1)
    opened = closing(DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000))
    with server_process(str(other)) as server, trainee(source, tmp_path) as trainer, opened as transport:
        async with client(server) as engine:
            await transport.deliver(transport.snapshot(trainer.engine), engine)
            trainer.assert_of_its_versions(await engine.agenerate(request(20)))
            trainer.train()
            await transport.deliver(transport.snapshot(trainer.engine), engine)
            trainer.assert_of_its_versions(await engine.agenerate(request(20)))


async def publish(transport: Any, trainer: Trainee, server: Served) -> None:
    await transport.deliver(transport.snapshot(trainer.engine), Servers(server))
    for name in list(server.groups):
        await server.leave_group(name)


def test_weights_that_were_released_come_back_with_the_biases_of_routers_or_not_at_all(tmp_path: Path):
    server = Served(write_family("glm4_moe", tmp_path / "model"))
    tensors = read_directory(str(tmp_path / "model"), server.form.shapes, server.form.tied)
    expected = server.logits()
    server.runner.release(["weights"])
    server.runner.resume(["weights"])
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    with pytest.raises(WeightsError, match=f"released, so all must be loaded again, and {bias} is missing"):
        server.take({name: tensor for name, tensor in tensors.items() if name != bias})
    server.take(tensors)
    torch.testing.assert_close(server.logits(), expected)


def rewritten(directory: Path, target: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model that was loaded in float32 and written; its specs say what they are."""
    writer = ModelWriter(load_model(directory))
    state = writer.model.state_dict()
    writer.write(target, {spec.name: state[spec.name].to(torch_dtype(spec)) for spec in writer.own_specs})
    written = load_file(target / "model.safetensors")
    assert {spec.name: (torch_dtype(spec), spec.shape) for spec in writer.specs} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()
    }
    return written


@pytest.mark.parametrize("family", ["ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "olmo_hybrid", "qwen4_exp_text"])
def test_what_files_of_bfloat16_hold_in_float32_or_as_integers_is_published_so(family: str, tmp_path: Path):
    write_family(family, tmp_path / "model")
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    load_tokenizer(tmp_path / "model").save_pretrained(tmp_path / "narrow")
    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} > {torch.bfloat16}
    written = rewritten(tmp_path / "narrow", tmp_path / "written")
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == written[name].dtype, name
        assert torch.equal(tensor, written[name]), name


def test_a_layer_that_files_name_unlike_others_keeps_its_name_though_transformers_would_rename_all(tmp_path: Path):
    """Kimi-Linear's files have `block_sparse_moe` in layers with experts, and `mlp` in those without."""
    file = write_family("kimi_linear", tmp_path / "model") / "model.safetensors"
    stored = {name.replace("0.block_sparse_moe.", "0.mlp."): tensor for name, tensor in load_file(file).items()}
    assert "model.layers.0.mlp.gate_proj.weight" in stored
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in stored
    save_file(stored, file, metadata={"format": "pt"})
    written = rewritten(tmp_path / "model", tmp_path / "written")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("family", ["gemma4", "llama4", "qwen3_5"])
def test_training_on_texts_leaves_a_tower_as_its_files_have_it(family: str, tmp_path: Path):
    settings = TrainConfig(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1))
    with closing(FSDPTrainEngine(write_family(family, tmp_path / "model"), settings)) as engine:
        engine.train_batch([[sequence(range(20 * i, 20 * i + 20), seed=i) for i in range(3)]], towards_advantage)
        engine.export(tmp_path / "written")
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "written"))
    assert written.keys() == stored.keys()
    kept = {name for name, tensor in stored.items() if torch.equal(tensor, written[name])}
    tower = {name for name in stored if ".visual." in name or "vision" in name or "multi_modal" in name}
    assert tower
    assert tower <= kept
    assert not {name for name in stored.keys() - tower if name.endswith("q_proj.weight")} & kept


def test_fields_of_a_config_that_transformers_translates_are_written_as_servers_read_them(tmp_path: Path):
    file = write_family("nemotron_h", tmp_path / "model") / "config.json"
    config = json.loads(file.read_text())
    kinds = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
    pattern = "".join(kinds[kind] for kind in config.pop("layers_block_type"))
    file.write_text(json.dumps({**config, "hybrid_override_pattern": pattern}))
    rewritten(tmp_path / "model", tmp_path / "written")
    assert json.loads((tmp_path / "written" / "config.json").read_text())["hybrid_override_pattern"] == pattern
