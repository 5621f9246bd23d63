"""Log-probabilities and entropies of tokens from hidden states, without ever holding [tokens, vocabulary] in full."""

from __future__ import annotations

from typing import Any

import torch


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob of each target, entropy of each distribution), float32[M] in nats, both differentiable.

    hidden [M, H] and weight [V, H] (the language-model head) in the compute dtype; targets int64[M];
    temperatures float32[M]: the divisor of each row's logits. With l = hidden W^T / temperature:

        logprob = l[target] - logsumexp(l)        entropy = logsumexp(l) - sum_v softmax(l)_v l_v

    Logits live for `chunk_size` rows at a time, float32, and are computed again in the backward pass.
    """
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperatures, chunk_size)  # pyright: ignore[reportReturnType]


class _ChunkedLogprobs(torch.autograd.Function):
    """With p = softmax(l), g and e the gradients of logprob and entropy H (the gradient of H is -p (log p + H)):

    dl = g (onehot(target) - p) - e p (log p + H),   dhidden = dl W / temperature,   dW = (dl / temperature)^T hidden

    Beside the matrix products, reading and writing chunks of logits costs most, as the vocabulary is long. So numbers
    of a row are combined first, and logits are changed in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprob)
        normaliser = torch.empty_like(logprob)
        for rows in _chunks(len(hidden), chunk_size):
            logits = _logits(hidden[rows], weight, temperatures[rows])
            peak = logits.amax(dim=-1)
            relative = logits.sub_(peak[:, None])
            unnormalised = relative.exp()
            total = unnormalised.sum(dim=-1)
            normaliser[rows] = peak + total.log()
            logprob[rows] = relative.gather(-1, targets[rows, None])[:, 0] - total.log()
            entropy[rows] = total.log() - torch.linalg.vecdot(unnormalised, relative) / total
        ctx.save_for_backward(hidden, weight, targets, temperatures, normaliser, entropy)
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, targets, temperatures, normaliser, entropy = ctx.saved_tensors
        g = grad_logprob / temperatures if grad_logprob is not None else torch.zeros_like(temperatures)
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # not beside adapters, whose model is frozen
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if is_trained else None
        for rows in _chunks(len(hidden), ctx.chunk_size):
            logp = _logits(hidden[rows], weight, temperatures[rows]).sub_(normaliser[rows, None])
            if grad_entropy is None:
                grad_logits = logp.exp_().mul_(-g[rows, None])
            else:
                e = grad_entropy[rows] / temperatures[rows]
                p = logp.exp()
                grad_logits = logp.mul_(-e[:, None]).sub_((e * entropy[rows] + g[rows])[:, None]).mul_(p)
            grad_logits.scatter_add_(-1, targets[rows, None], g[rows, None])
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """float32. On a GPU the product is not rounded to half precision first; torch can do so on GPUs alone."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = hidden @ weight.T
    return torch.div(logits, temperatures[:, None], out=logits if logits.dtype == torch.float32 else None)


def _chunks(num_rows: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, num_rows)) for start in range(0, num_rows, chunk_size)]
