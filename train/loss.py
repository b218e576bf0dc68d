"""The loss of a micro-batch: cross-entropy over all logits at once, or over slices of tokens.

Takes a LoopSpec, the module, token ids and targets (B, T); gives the mean loss in fp32, nats per token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from train.shapes import LOSS_CHUNKS
from train.spec import LoopSpec


def batch_loss(loop: LoopSpec, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of inputs and targets (B, T), as train.loss computes it."""
    if loop.loss == "chunked":
        return module(inputs, targets)  # type: ignore[no-any-return]
    return cross_entropy(module(inputs), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in fp32, nats per token, of logits (B, T, V) and targets (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in fp32 of logits hidden @ weight.T, of which no more than a slice of tokens is ever there.

    hidden (N, d) and weight (V, d) in the compute dtype, targets (N,). The N tokens are taken in LOSS_CHUNKS slices of
    n = ceil(N / LOSS_CHUNKS). The gradients are made in the forward pass, slice by slice, so nothing runs again in
    backward. With gradients enabled these are alive, beside hidden, weight and targets:

    - from the first slice to the backward: the gradients of hidden (N, d) and of weight (V, d), compute dtype;
    - at the worst instant of a slice: with fp32 compute one (n, V) in fp32, which is logits, then probabilities, then
      the logits' gradient, each in the place of the one before; with bf16 compute one (n, V) in fp32 and one in bf16,
      first where the logits become fp32, then where their gradient becomes bf16;
    - during the two products that give the gradients: one (n, V) in the compute dtype, no other;
    - vectors of n fp32 numbers: four at most, and the sum of the losses.

    Without gradients: the slice and the vectors only. tests/test_loss.py holds all of it.
    """
    if torch.is_grad_enabled():
        return _ChunkedCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-any-return]
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for rows in _slices(hidden.shape[0]):
        total += _losses_and_probabilities(hidden[rows], weight, targets[rows])[0].sum()
    return total / hidden.shape[0]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        tokens = hidden.shape[0]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in _slices(tokens):
            losses, grad = _losses_and_probabilities(hidden[rows], weight, targets[rows])
            total += losses.sum()
            grad[torch.arange(grad.shape[0], device=grad.device), targets[rows]] -= 1.0
            grad = grad.div_(tokens).to(hidden.dtype)
            torch.mm(grad, weight, out=hidden_grad[rows])
            weight_grad.addmm_(grad.t(), hidden[rows])
            del losses, grad  # else they are alive beside those of the next slice
        ctx.grads = (hidden_grad, weight_grad)
        return total / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.grads is None:
            raise RuntimeError(
                "train.loss=chunked keeps its gradients for one backward pass, and this is the second of one forward. "
                "Run the forward again, or set train.loss=full."
            )
        (hidden_grad, weight_grad), ctx.grads = ctx.grads, None
        return hidden_grad.mul_(loss_grad), weight_grad.mul_(loss_grad), None


def _slices(tokens: int) -> list[slice]:
    """LOSS_CHUNKS slices of equal size, rounded up; the last ones are shorter or missing."""
    size = -(-tokens // LOSS_CHUNKS)
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


def _losses_and_probabilities(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of one slice, in fp32: the loss of each token (n,), and in the place of the logits their softmax (n, V)."""
    logits = (hidden @ weight.t()).float()
    logits -= logits.amax(dim=-1, keepdim=True)
    of_targets = logits.gather(-1, targets[:, None]).squeeze(-1)
    sums = logits.exp_().sum(dim=-1)
    logits /= sums[:, None]
    return sums.log() - of_targets, logits
