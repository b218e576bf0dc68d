"""The loss of the held-out part of the data over all ranks.

Takes the sharded module and the Sequences; gives nats per token and per byte.
"""

import torch
import torch.distributed as dist
from torch import nn

from train.corpus import Corpus
from train.data import Sequences
from train.loss import batch_loss
from train.model import eval_mode
from train.spec import TrainSpec


def evaluate(spec: TrainSpec, module: nn.Module, sequences: Sequences, device: torch.device) -> float:
    """Mean loss of the first `train.eval.sequences` held-out sequences, nats per token; collective.

    All ranks make the same number of forward passes; a rank without a sequence left repeats the last one
    with weight zero.
    """
    count = min(spec.train.eval.sequences, sequences.num_eval)
    width, rank, world = spec.train.micro_batch, dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), device=device)
    with eval_mode(module):
        for begin in range(0, count, width * world):
            first = begin + rank * width
            mine = max(0, min(width, count - first))
            inputs, targets = sequences.held_out(min(first, count - 1), max(mine, 1))
            loss = batch_loss(spec.train, module, inputs.to(device), targets.to(device))
            total += loss * mine
    dist.all_reduce(total)
    return float(total) / count


def nats_per_byte(eval_loss: float, corpus: Corpus) -> float:
    """A held-out loss per token as one per byte of held-out text."""
    return eval_loss * corpus.eval_tokens / corpus.eval_text_bytes
