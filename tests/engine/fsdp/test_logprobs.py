"""Chunked log-probabilities equal a full log-softmax, also over some ids alone, in a chunk's memory; so do those of the
reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import tiny_family
from train_models import MakeEngine, Memory, load_twin, write_model
from train_sequences import (
    LOSS,
    assert_same_rows,
    constrained_sequences,
    random_kept_ids,
    random_sequences,
    same,
    twin_rows,
)
from train_variants import weights_of

from arl.api.errors import CheckpointError, ConfigError, ModelError
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import LoRAConfig
from arl.engine.fsdp import policy as policy_models
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.policy import LogitsForm, head_bias, head_weight, logits_form, token_logprobs
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.trial import transformer_layers

M, H, V = 37, 8, 50
FLOAT = 4
FORMS = [LogitsForm(), LogitsForm(scale=0.3), LogitsForm(cap=3.0), LogitsForm(scale=1.7, cap=5.0)]


# Numbers


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": (2 * torch.randn(M, H, generator=generator)).requires_grad_(),
        "weight": torch.randn(V, H, generator=generator, requires_grad=True),
        "targets": torch.randint(0, V, (M,), generator=generator),
        "temperatures": 0.3 + torch.rand(M, generator=generator),
    }


def full(
    kept_ids: KeptIds | None, form: LogitsForm, hidden, weight, targets, temperatures, bias=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row after another, over the logits of its kept ids and no others, in float64."""
    rows: list[torch.Tensor] = []
    masks = torch.ones(M, V, dtype=torch.bool) if kept_ids is None else torch.from_numpy(kept_ids.mask(V))
    for row, kept in enumerate(masks):
        ids = kept.nonzero()[:, 0]
        logits = form.scale * (
            weight.double()[ids] @ hidden.double()[row] + (0 if bias is None else bias.double()[ids])
        )
        if form.cap is not None:
            logits = form.cap * torch.tanh(logits / form.cap)
        logp = torch.log_softmax(logits / temperatures.double()[row], dim=0)
        rows.append(torch.stack([logp[ids == targets[row]].sum(), -(logp.exp() * logp).sum()]))
    logprobs, entropies = torch.stack(rows).T
    return logprobs, entropies


@pytest.mark.parametrize("chunk_size", [1, 10, M, 1000])
@pytest.mark.parametrize("upstream", [(1.0, None), (None, 1.0), (1.0, 0.7)])
@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_equal_those_of_a_full_log_softmax_over_the_ids_that_were_kept(
    inputs: dict[str, torch.Tensor],
    chunk_size: int,
    upstream: tuple[float | None, float | None],
    is_constrained: bool,
    form: LogitsForm,
    has_bias: bool,
):
    """Also if the loss looks at one output alone, and of logits that the model scales, soft-caps or adds a bias to."""
    kept_ids = random_kept_ids(inputs["targets"], torch.Generator().manual_seed(1), V) if is_constrained else None
    if has_bias:
        inputs["bias"] = torch.linspace(-2, 2, V, requires_grad=True)
    trained = [tensor for tensor in inputs.values() if tensor.requires_grad]
    gradients: list[tuple[torch.Tensor, ...]] = []
    ours = token_logprobs(**inputs, chunk_size=chunk_size, kept_ids=kept_ids, form=form)
    theirs = full(kept_ids, form, **inputs)
    for outputs in (ours, theirs):
        weighed = [(x * y * torch.linspace(-1, y, M)).sum() for x, y in zip(outputs, upstream, strict=True) if y]
        gradients.append(torch.autograd.grad(sum(weighed, torch.zeros(())), trained))
    for mine, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), twin, rtol=1e-5, atol=1e-5)
    for mine, twin in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-4, atol=2e-5)


def test_no_tokens_give_no_logprobs_and_zero_gradients(inputs):
    nothing = {name: value[:0] if name != "weight" else value for name, value in inputs.items()}
    logprob, _ = token_logprobs(**nothing, chunk_size=10)
    (gradient,) = torch.autograd.grad(logprob.sum(), inputs["weight"])
    assert logprob.shape == (0,)
    assert not gradient.any()


@pytest.mark.parametrize("kept_ids", [None, KeptIds.of([[0, 7]] * M)], ids=["all ids", "two ids"])
@pytest.mark.parametrize("form", FORMS)
def test_extreme_logits_stay_finite_and_an_excluded_id_gets_no_gradient(
    inputs, kept_ids: KeptIds | None, form: LogitsForm
):
    given = inputs | {"hidden": inputs["hidden"].detach() * 1e4, "targets": torch.zeros(M, dtype=torch.int64)}
    logprob, entropy = token_logprobs(**given, chunk_size=10, kept_ids=kept_ids, form=form)
    (gradient,) = torch.autograd.grad((logprob + entropy).sum(), inputs["weight"])
    assert all(values.isfinite().all() for values in (logprob, entropy, gradient))
    assert kept_ids is None or set(gradient.any(1).nonzero()[:, 0].tolist()) <= {0, 7}


def test_a_set_with_an_id_beyond_the_vocabulary_is_an_error(inputs):
    with pytest.raises(ValueError, match=f"kept_ids names token id {V}, but the model has {V} tokens"):
        token_logprobs(**inputs, chunk_size=10, kept_ids=KeptIds.of([[0, V]] * M))


def test_sequences_that_share_a_token_have_sets_of_their_own_for_it(make_engine: MakeEngine, model_dir: Path):
    sequences, twin = constrained_sequences(4), load_twin(model_dir)
    engine = make_engine(model_dir, max_tokens_per_microbatch=100)
    engine.update_reference()
    for output in ("logprobs", "reference_logprobs"):
        assert_same_rows(engine.forward(sequences, output), twin_rows(twin, sequences))


# The form of a model's logits


@pytest.mark.parametrize(
    ("family", "form"),
    {
        "qwen3": LogitsForm(),
        "phi": LogitsForm(),  # has a bias
        "cohere": LogitsForm(scale=0.7),
        "granite": LogitsForm(scale=1 / 1.5),
        "falcon_h1": LogitsForm(scale=1.5),
        "minicpm3": LogitsForm(scale=4.0),  # of the states before the head
        "gemma2": LogitsForm(cap=3.0),
        "xlstm": LogitsForm(cap=3.0),  # a decoder of its own kind
    }.items(),
)
@torch.no_grad()
def test_the_form_of_logits_is_found_in_a_models_outputs_and_gives_its_log_probabilities(family: str, form: LogitsForm):
    model = tiny_family(family)
    assert logits_form(model) == form
    input_ids = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    theirs = model(input_ids=input_ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state[0, :-1]
    targets = input_ids[0, 1:]
    of_head = {"weight": head_weight(model), "bias": head_bias(model), "form": form}
    ours, _ = token_logprobs(hidden, targets=targets, temperatures=torch.ones(11), chunk_size=5, **of_head)
    torch.testing.assert_close(ours, theirs.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [1.0, 30.0, 1000.0])
def test_a_bias_does_not_hide_a_cap_nor_a_scale(cap: float):
    model = tiny_family("phi")
    model.config.cap, model.config.scale = cap, 0.03
    torch.nn.init.normal_(model.lm_head.bias, std=20.0)
    model.lm_head.register_forward_hook(lambda module, args, z: cap * torch.tanh(0.03 * z / cap))
    assert logits_form(model) == LogitsForm(scale=0.03, cap=cap)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.register_forward_hook(lambda module, args, z: z.clamp(-5, 5)),
        lambda head: head.register_forward_hook(lambda module, args, z: z[..., :-1]),
        lambda head: head.register_forward_hook(lambda module, args, z: z.where(z > 0, 0.9 * z)),
        lambda head: head.register_forward_pre_hook(lambda module, args: (args[0] / 2,)),  # not the bias
        lambda head: head.register_forward_pre_hook(lambda module, args: (args[0].relu(),)),
    ],
)
def test_logits_of_another_form_are_refused(change: Callable[[torch.nn.Module], object]):
    model = tiny_family("phi")
    torch.nn.init.normal_(model.lm_head.bias)
    logits_form(model)
    change(model.lm_head)
    with pytest.raises(ModelError, match="PhiForCausalLM makes logits that are no scaled and soft-capped outputs"):
        logits_form(model)


# Memory


def memory_of(num_tokens: int, vocabulary: int, chunk_size: int, form: LogitsForm = FORMS[0]) -> Memory:
    """Of one forward and backward pass; weights and hidden states were there before."""
    hidden = torch.randn(num_tokens, H, requires_grad=True)
    weight = torch.randn(vocabulary, H, requires_grad=True)
    targets, temperatures = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
    with Memory() as memory:
        values, entropies = token_logprobs(hidden, weight, targets, temperatures, chunk_size, form=form)
        (values.sum() + entropies.sum()).backward()
    return memory


def test_more_tokens_take_no_more_logits():
    few, many = (memory_of(n, vocabulary=4096, chunk_size=32) for n in (64, 1024))
    per_token = 16 * H * FLOAT  # a few rows like its hidden state, and a few numbers
    assert many.peak - few.peak < (1024 - 64) * per_token
    assert many.largest == few.largest == 32 * 4096 * FLOAT


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_that_of_a_few_chunks_of_logits_and_the_weights_gradient(form: LogitsForm):
    for vocabulary, chunk_size in ((1024, 32), (8192, 32), (8192, 128)):
        memory = memory_of(512, vocabulary, chunk_size, form)
        logits, gradient, rest = (size * FLOAT for size in (chunk_size * vocabulary, vocabulary * H, 512 * H))
        assert logits <= memory.peak < 6 * logits + 4 * gradient + 16 * rest


def test_a_training_pass_holds_no_logits_for_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_models, "LOGPROB_CHUNK_SIZE", 4)
    policy = load_model(write_model(tmp_path, tied=True)).token_model()
    batch = build_microbatch(random_sequences(40), torch.device("cpu"))
    num_logits = len(batch.targets) * policy.model.config.vocab_size
    with Memory() as memory:
        outputs = policy(batch)
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    assert memory.largest < num_logits * FLOAT / 2


def assert_unmoved(engine: FSDPTrainEngine, expected: dict[str, torch.Tensor]) -> None:
    assert [name for name, tensor in weights_of(engine).items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize("options", [{}, {"lora": LoRAConfig(rank=2, alpha=8)}, {"dtype": "bfloat16"}])
def test_the_reference_says_what_the_weights_said_when_it_was_made(make_engine: MakeEngine, options: dict[str, Any]):
    engine, sequences = make_engine(max_tokens_per_microbatch=40, **options), random_sequences(6)
    engine.train_batch([sequences], LOSS)
    before = engine.forward(sequences)
    engine.update_reference()
    engine.train_batch([sequences], LOSS)
    trained, now = weights_of(engine), engine.forward(sequences)
    assert engine._reference.values.keys() == trained.keys()
    assert not same(now, before)
    assert same(engine.forward(sequences, "reference_logprobs"), before)
    assert_unmoved(engine, trained)
    assert same(engine.forward(sequences), now)
    never_asked = make_engine(max_tokens_per_microbatch=40, **options)
    for _ in range(3):
        never_asked.train_batch([sequences], LOSS)
    engine.train_batch([sequences], LOSS)
    assert_unmoved(engine, weights_of(never_asked))


def test_weights_are_put_back_when_the_reference_fails_to_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    def failing(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    engine, sequences = make_engine(), random_sequences(4)
    engine.update_reference()
    reference = engine.forward(sequences)
    engine.train_batch([sequences], LOSS)
    trained, now = weights_of(engine), engine.forward(sequences)
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layers(engine._policy.model)[1].mlp, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward(sequences, "reference_logprobs")
    assert_unmoved(engine, trained)
    assert same(engine.forward(sequences), now)
    assert same(engine.forward(sequences, "reference_logprobs"), reference)


def test_a_share_moves_each_weight_so_far_towards_the_current_one(
    make_engine: MakeEngine, model_dir: Path, tmp_path: Path
):
    engine, sequences = make_engine(model_dir), random_sequences(5)
    engine.update_reference(0.5)  # the first makes it, whatever the share
    assert same(engine.forward(sequences, "reference_logprobs"), engine.forward(sequences))
    engine.train_batch([sequences], LOSS)
    engine.update_reference(0.3)
    ours = engine.forward(sequences, "reference_logprobs")
    engine.export(tmp_path / "now")
    twin, start, now = load_twin(model_dir), load_twin(model_dir).state_dict(), load_twin(tmp_path / "now").state_dict()
    twin.load_state_dict({name: start[name] + 0.3 * (now[name] - start[name]) for name in start})
    assert_same_rows(ours, twin_rows(twin, sequences))
    engine.update_reference(1.0)
    assert same(engine.forward(sequences, "reference_logprobs"), engine.forward(sequences))


def test_a_reference_answers_only_once_it_was_made_and_moves_by_a_share_of_at_most_1(make_engine: MakeEngine):
    engine = make_engine()
    with pytest.raises(ConfigError, match="call update_reference first"):
        engine.forward(random_sequences(1), "reference_logprobs")
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"share is {share}"):
            engine.update_reference(share)


def test_loading_replaces_the_reference_and_refuses_a_checkpoint_without_one(make_engine: MakeEngine, tmp_path: Path):
    engine, sequences = make_engine(), random_sequences(5)
    engine.save(tmp_path / "without").wait()
    engine.update_reference()
    reference = engine.forward(sequences)
    engine.train_batch([sequences], LOSS)
    engine.save(tmp_path / "with").wait()
    moved = make_engine()
    moved.train_batch([sequences[:2]], LOSS)
    moved.update_reference()
    moved.load(tmp_path / "with")
    assert same(moved.forward(sequences, "reference_logprobs"), reference)
    with pytest.raises(CheckpointError, match="without has no reference policy, and this run needs one"):
        moved.load(tmp_path / "without")
    assert same(moved.forward(sequences), engine.forward(sequences))
