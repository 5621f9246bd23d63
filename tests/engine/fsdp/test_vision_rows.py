"""A packed row with images gives what transformers gives its sequences one at a time, and each image is seen once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_sequences import LOSS, twin_logprobs, twin_loss
from vision_sequences import FAMILIES, ONE, SAME_SIZE, load_seeing_twin, seeing_sequences, sequence_of, write_seeing_model

from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.policy import Policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.mark.parametrize("share_prefixes", [True, False], ids=["shared", "apart"])
def test_logprobs_and_gradients_are_those_of_each_sequence_by_itself(model_dir: Path, share_prefixes: bool) -> None:
    loaded = load_model(model_dir)
    assert loaded.processor is not None
    sequences = seeing_sequences(loaded.processor)
    policy, twin = Policy(loaded.model, logprob_chunk_size=16), load_seeing_twin(model_dir)
    batch = build_microbatch(sequences, CPU, share_prefixes=share_prefixes, processor=loaded.processor)
    outputs = policy(batch)
    ours = (LOSS(outputs, batch.tokens).loss * batch.tokens.loss_weights).sum()
    ours.backward()

    theirs = twin_loss(twin, sequences, LOSS)
    theirs.backward()
    with torch.no_grad():
        logprobs, entropy = (torch.cat(x) for x in zip(*(twin_logprobs(twin, s) for s in sequences), strict=True))
    for mine, expected in ((ours, theirs), (outputs.logprobs, logprobs), (outputs.entropy, entropy)):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    for (name, p), (_, q) in zip(policy.model.named_parameters(), twin.named_parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
