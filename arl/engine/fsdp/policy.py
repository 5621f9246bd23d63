"""The trained module, a model with its head, and the reference policy beside it.

tokens --decoder--> hidden states --language-model head [V, H]--> log-probabilities, entropies
                                  --value head [1, H]-----------> values
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass, tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from arl.api.errors import ModelError
from arl.api.sampling_mask import KeptIds
from arl.api.train_engine import Head, TokenOutputs
from arl.engine.fsdp.minibatch import Microbatch
from arl.engine.fsdp.vision import decoder_inputs
from arl.engine.fsdp.ways import RowDecoder
from arl.engine.trial import decoder_of

# Sharding gathers the root's weights for the backward pass when it reaches the outputs. torch before 2.13 finds them
# only in registered records.
register_dataclass(TokenOutputs)


LOGPROB_CHUNK_SIZE = 1024
"""For how many tokens the logits, [tokens, vocabulary], are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsForm:
    """What a model makes of z = hidden W^T + bias, for numbers that its config has.

    logits = scale * z, or soft-capped cap * tanh(scale * z / cap)
    """

    scale: float = 1.0
    cap: float | None = None


class TokenModel(nn.Module):
    """A model that computes the outputs of its head for a microbatch's trained tokens.

    head value: a critic or a reward model, which is a sequence-classification model of one label, read at every trained
    token. A token's value is the score of the context before it, so a whole text's score is that of any token after it.
    `forward` itself uses the head's weights, so that sharding this module as the root gathers them when needed.
    """

    def __init__(self, decoder: RowDecoder, head: Head = "policy", form: LogitsForm = LogitsForm()) -> None:
        """form: of the language-model head, as `logits_form` finds it; plain by default."""
        super().__init__()
        self.model = decoder.model
        self.decode = decoder
        self.head: Head = head
        self.form = form

    def forward(self, batch: Microbatch) -> TokenOutputs:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.images is not None:
            inputs = decoder_inputs(self.model, batch.input_ids, batch.images)
        # [M, H]: from which the trained tokens are predicted.
        hidden = self.decode(inputs, batch.position_ids, batch.layout, batch.routes)[batch.predictors]
        if self.head == "value":
            values = token_values(hidden, score_weight(self.model))
            nothing = torch.zeros_like(values, requires_grad=False)
            return TokenOutputs(logprobs=nothing, entropy=nothing, values=values)
        of_tokens = batch.targets, batch.temperatures, LOGPROB_CHUNK_SIZE, batch.kept_ids
        of_head = head_bias(self.model), self.form
        logprobs, entropy = token_logprobs(hidden, head_weight(self.model), *of_tokens, *of_head)
        return TokenOutputs(logprobs=logprobs, entropy=entropy, values=torch.zeros_like(logprobs, requires_grad=False))


def token_values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [M, H], weight [1, H] of a value head -> float32[M], summed in float32."""
    return hidden.float() @ weight.float()[0]


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The language-model head's weight [V, H]; the embedding's own when they are tied."""
    return cast("nn.Linear", model.get_output_embeddings()).weight


def head_bias(model: PreTrainedModel) -> torch.Tensor | None:
    """The language-model head's bias [V], where it has one."""
    return getattr(model.get_output_embeddings(), "bias", None)


def score_weight(model: PreTrainedModel) -> torch.Tensor:
    """The weight [1, H] of a sequence-classification model's head."""
    return cast("nn.Linear", model.score).weight


class _States(MoeModelOutputWithPast):
    """A decoder's output, whose other parts are None by any name."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def logits_form(model: PreTrainedModel) -> LogitsForm:
    """How the model makes logits of its decoder's hidden states, found from its own outputs.

    Its decoder is bypassed: the model's forward gets random states, with z of about the powers of 4. Huge ones
    show the cap, as tanh becomes 1, and then those within the cap the scale. A number that the config has, or its
    inverse, is taken exactly. The model: in float32, on one device, not sharded. Raises ModelError for other logits.
    """
    weight, bias, decoder = head_weight(model).detach(), head_bias(model), decoder_of(model)
    sizes = 4.0 ** torch.arange(-3, 13, device=weight.device)[:, None]
    states = torch.randn(len(sizes), weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    states *= sizes / (states @ weight[:: len(weight) // 1024 + 1].T).abs().amax(dim=1, keepdim=True)
    decoder.forward = lambda *args, **kwargs: _States(last_hidden_state=cast("Any", states[None]))
    try:
        input_ids = torch.zeros(1, len(sizes), dtype=torch.int64, device=weight.device)
        logits = model(input_ids=input_ids, use_cache=False).logits[0].double()
    finally:
        del decoder.forward  # the class has its own
    z = nn.functional.linear(states, weight, bias).double()
    what = "are no scaled and soft-capped outputs of its head: arl can train no others"
    refusal = ModelError(f"{type(model).__name__} makes logits that {what}")
    if logits.shape != z.shape:
        raise refusal
    known = [1.0, *(x for x in tree_leaves(model.config.to_dict()) if isinstance(x, int | float) and 0 < x < torch.inf)]

    def exact(number: float) -> float:
        either = (float(x) for value in known for x in (value, 1 / value))
        return next((x for x in either if abs(number - x) <= 1e-6 * x), number)

    *_, before, largest = logits.abs().amax(dim=1).tolist()
    cap = exact(largest) if largest < 2 * before else None
    bound = 0.7 * cap if cap else before  # where tanh can be inverted precisely
    row = (logits.abs().median(dim=1).values < bound).sum() - 1
    if row >= 0:
        within = logits[row].abs() < bound
        found, own = logits[row][within], z[row][within]
        found = found if cap is None else cap * torch.atanh(found / cap)
        scale = exact((torch.dot(found, own) / torch.dot(own, own)).item())
        expected = scale * z if cap is None else cap * torch.tanh(scale * z / cap)
        reach = (scale * z).abs().amax(dim=1, keepdim=True)
        if ((logits - expected).abs() <= 1e-5 * reach)[reach[:, 0] < (10 * cap if cap else torch.inf)].all():
            return LogitsForm(scale=scale, cap=cap)
    raise refusal


# Log-probabilities

_EXCLUDED = -1e30
"""The logit of an excluded id: its probability is 0, and unlike with minus infinity so is its share of an entropy."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    chunk_size: int,
    kept_ids: KeptIds | None = None,
    bias: torch.Tensor | None = None,
    form: LogitsForm = LogitsForm(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob of each target, entropy of each distribution), float32[M] in nats, both differentiable.

    hidden [M, H], weight [V, H] and bias [V] (the language-model head) in the compute dtype; targets int64[M];
    temperatures float32[M]: the divisor of each row's logits; kept_ids [M]: the set K of ids that each distribution is
    over, None for the whole vocabulary. With l = logits / temperature, logits as LogitsForm has them, and sums over v
    in K:

        logprob = l[target] - logsumexp(l)        entropy = logsumexp(l) - sum_v softmax(l)_v l_v

    It never holds [M, V]: logits live for `chunk_size` rows, in float32, and the backward pass computes them again.
    Raises ValueError if a set holds an id that the model does not have.
    """
    if kept_ids is not None and len(kept_ids.ids) and (last := int(kept_ids.ids.max())) >= len(weight):
        raise ValueError(f"kept_ids names token id {last}, but the model has {len(weight)} tokens")
    of_tokens = targets, temperatures, chunk_size, kept_ids
    return _ChunkedLogprobs.apply(hidden, weight, bias, form, *of_tokens)  # pyright: ignore[reportReturnType]


class _ChunkedLogprobs(torch.autograd.Function):
    """With p = softmax(l), g and e the gradients of logprob and entropy H (the gradient of H is -p (log p + H)):

    dl = g (onehot(target) - p) - e p (log p + H),   dhidden = dz W,   dW = dz^T hidden,   dbias = sum dz
    dz = scale / temperature * dl, by soft-capping times 1 - tanh^2 = 1 - (temperature * l / cap)^2

    Beside the products, reading and writing logits costs most. So a row's numbers are combined first, and logits
    change in place.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd takes them one by one)
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        form: LogitsForm,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        chunk_size: int,
        kept_ids: KeptIds | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprob)
        normaliser = torch.empty_like(logprob)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _logits(hidden[rows], weight, bias, form, temperatures[rows], kept_ids and kept_ids.take(rows))
            peak = logits.amax(dim=-1)
            relative = logits.sub_(peak[:, None])
            unnormalised = relative.exp()
            total = unnormalised.sum(dim=-1)
            normaliser[rows] = peak + total.log()
            logprob[rows] = relative.gather(-1, targets[rows, None])[:, 0] - total.log()
            entropy[rows] = total.log() - torch.linalg.vecdot(unnormalised, relative) / total
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normaliser, entropy)
        ctx.form, ctx.chunk_size, ctx.kept_ids = form, chunk_size, kept_ids
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 8
        hidden, weight, bias, targets, temperatures, normaliser, entropy = ctx.saved_tensors
        form: LogitsForm = ctx.form
        divisors = temperatures / form.scale
        g = grad_logprob / divisors if grad_logprob is not None else torch.zeros_like(divisors)
        grad_hidden = torch.empty_like(hidden)
        # Not beside adapters, whose model is frozen.
        grad_weight, grad_bias = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if is_trained else None
            for x, is_trained in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            kept_ids = ctx.kept_ids and ctx.kept_ids.take(rows)
            logits = _logits(hidden[rows], weight, bias, form, temperatures[rows], kept_ids)
            slope = None
            if form.cap is not None:  # an excluded id's is 0 too
                slope = logits.mul((temperatures[rows] / form.cap)[:, None]).square_().neg_().add_(1).clamp_(min=0)
            logp = logits.sub_(normaliser[rows, None])
            if grad_entropy is None:
                grad_logits = logp.exp_().mul_(-g[rows, None])
            else:
                e = grad_entropy[rows] / divisors[rows]
                p = logp.exp()
                grad_logits = logp.mul_(-e[:, None]).sub_((e * entropy[rows] + g[rows])[:, None]).mul_(p)
            grad_logits.scatter_add_(-1, targets[rows, None], g[rows, None])
            if slope is not None:
                grad_logits.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        of_head = (None if x is None else x.to(weight.dtype) for x in (grad_weight, grad_bias))
        return grad_hidden, *of_head, None, None, None, None, None


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: LogitsForm,
    temperatures: torch.Tensor,
    kept_ids: KeptIds | None,
) -> torch.Tensor:
    """float32. On a GPU the product is not rounded to half precision first; on a CPU torch cannot avoid that."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = hidden @ weight.T
    if bias is not None:
        logits = logits.float().add_(bias)
    if form.cap is not None:
        logits = logits.float().mul_(form.scale / form.cap).tanh_()
    divisors = temperatures / (form.cap or form.scale)
    logits = torch.div(logits, divisors[:, None], out=logits if logits.dtype == torch.float32 else None)
    if kept_ids is not None:
        _exclude(logits, kept_ids)
    return logits


def _exclude(logits: torch.Tensor, kept_ids: KeptIds) -> None:
    """Give the ids that a row's set lacks a logit so low that they have no part in it."""
    is_kept = torch.tensor(kept_ids.lists_excluded, device=logits.device)  # a copy: Ray's arrays are read-only
    listing, listed = (torch.from_numpy(column).to(logits.device) for column in kept_ids.listed())
    excluded = ~is_kept[:, None].repeat(1, logits.shape[1])
    excluded[listing, listed] = is_kept[listing]
    index = torch.from_numpy(kept_ids.index.astype("int64"))
    rows = (index >= 0).nonzero()[:, 0]
    sets = index[rows].to(logits.device)
    if len(rows) == len(logits):
        logits.masked_fill_(excluded[sets], _EXCLUDED)
    else:
        rows = rows.to(logits.device)
        logits[rows] = logits[rows].masked_fill_(excluded[sets], _EXCLUDED)


# The reference policy


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, in the same memory; an unsharded tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, by name. With adapters all others are frozen, and stay as in the model's directory."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class Reference:
    """A second set of values for a module's trained parameters, sharded alike. Empty until the first `update`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values: dict[str, torch.Tensor] = {}
        """Parameter name -> value. Checkpoints are read into these tensors."""

    @torch.no_grad()
    def update(self, share: float) -> None:
        """reference += share * (current - reference), in place. The first call copies the current values."""
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; it must be above 0 and at most 1")
        trained = trained_parameters(self._module)
        if not self.values:
            self.values = {name: p.detach().clone() for name, p in trained.items()}
            return
        for name, value in self.values.items():
            local_shard(value).lerp_(local_shard(trained[name].detach()), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the module the reference's values inside the block, and its own again afterwards, to the bit.

        Release gathered weights before the block and at its end: they belong to the other policy.
        """
        trained = trained_parameters(self._module)
        # Allocated first: putting the module's own values back must not fail for lack of memory.
        shards = [local_shard(value) for value in self.values.values()]
        scratch = torch.empty_like(max(shards, key=torch.Tensor.numel, default=torch.empty(0))).flatten()

        def exchange(name: str) -> None:
            """In place, as sharding reads the parameters' own memory."""
            current, other = local_shard(trained[name].detach()), local_shard(self.values[name])
            kept = scratch[: current.numel()].view_as(current)
            kept.copy_(current)
            current.copy_(other)
            other.copy_(kept)

        exchanged: list[str] = []
        try:
            for name in self.values:
                exchange(name)
                exchanged.append(name)
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # offloaded weights may still be copied out of the memory written below
            for name in exchanged:
                exchange(name)
