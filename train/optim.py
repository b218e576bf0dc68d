"""AdamW, its learning rate by step, and gradient clipping.

Takes the sharded module and an OptimSpec.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.spec import OptimSpec, TrainSpec


def build_optimizer(module: nn.Module, optim: OptimSpec) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; states are made in the first step."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=optim.impl == "fused",
        foreach=optim.impl == "foreach",
    )


def learning_rate(spec: TrainSpec, step: int) -> float:
    """Rate of optimizer step `step`, counted from 1: linear warm-up, then cosine or constant.

    Source of the cosine: Loshchilov and Hutter, SGDR (arXiv 1608.03983), without restarts.
    """
    optim = spec.optim
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    length = optim.decay_steps or spec.planned_steps
    assert length is not None  # train.checks refuses a cosine without a length
    progress = min(1.0, (step - optim.warmup_steps) / max(1, length - optim.warmup_steps))
    floor = optim.min_lr_fraction
    return optim.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all groups this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their norm over all ranks is at most max_norm; gives the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
