"""Activation checkpointing of blocks: whole, or but for the outputs that a policy keeps by name.

Takes the unsharded module and a CkptSpec, changes the named blocks in place. Applied before compile and
before fully_shard, as torchtitan orders them.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from train import shapes
from train.model import Block, Transformer
from train.spec import CkptSpec

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.linear.default,  # on devices that have a kernel of their own for it
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations that make an output which can be kept; a submodule of Block.makers runs one of them, once."""


def apply_checkpointing(module: Transformer, ckpt: CkptSpec) -> None:
    """Make the policy's blocks keep their inputs, under ckpt=ops `ckpt.save` too, and run the rest again in backward.

    The block's forward is replaced, not wrapped in a module, so parameter names, and with them
    checkpoints on disk, do not depend on the policy.
    """
    for index in ckpt.layers_recomputed(len(module.blocks)):
        block = module.blocks[index]
        assert isinstance(block, Block)
        options: dict[str, Any] = {}
        if ckpt.save is not None:
            options["context_fn"] = _Keeper(block, shapes.saved_ops(module.model, ckpt.save)).contexts
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


class _Keeper:
    """Keeps a block's named outputs: it knows, from the submodule that runs, which one is being computed.

    So what is kept depends neither on the order of the calls nor on how many there are.
    """

    def __init__(self, block: Block, names: frozenset[str]) -> None:
        self._computing: str | None = None
        self._asked = False
        self._kept = 0
        makers = block.makers()
        for name in sorted(names):
            maker = makers[name]
            maker.forward = functools.partial(self._compute, name, maker.forward)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass of one block, and for its recomputation."""
        return create_selective_checkpoint_contexts(self._policy)  # type: ignore[no-any-return, no-untyped-call]

    def _compute(self, name: str, forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        self._computing, self._asked, self._kept = name, False, 0
        try:
            output = forward(*args)
        finally:  # the recomputation ends by an exception once it has all it needs
            self._computing = None
        if self._asked and self._kept != 1:
            raise RuntimeError(
                f"ckpt.save={name}: it is to keep one product, and torch made {self._kept} there. "
                "Leave the name out of ckpt.save, or use ckpt=full."
            )
        return output

    def _policy(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if self._computing is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        keep = op in _PRODUCTS
        if not context.is_recompute:  # older torch asks in the recomputation too
            self._asked = True
            self._kept += keep
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
