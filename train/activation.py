"""Activation checkpointing of whole blocks.

Takes the unsharded module and a CkptSpec, changes the named blocks in place. Applied before compile and
before fully_shard, as torchtitan orders them.
"""

import functools

from torch.utils.checkpoint import checkpoint

from train.model import Transformer
from train.spec import CkptSpec


def apply_checkpointing(module: Transformer, ckpt: CkptSpec) -> None:
    """Make the policy's blocks keep only their inputs and run their forward again in backward.

    The block's forward is replaced, not wrapped in a module, so parameter names, and with them
    checkpoints on disk, do not depend on the policy.
    """
    for index in ckpt.layers_recomputed(len(module.blocks)):
        block = module.blocks[index]
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
