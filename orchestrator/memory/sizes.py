"""Sizes that all moments of a step share: of a block's operations, of the groups of parameters, of the loss.

Takes a TrainSpec, gives bytes of rank 0. It must not import torch.
"""

from bisect import bisect_left

from orchestrator.memory.block import FP32, WIDTH, Setting, block_ops, last_norm_ops, setting
from orchestrator.memory.graph import Footprint, Op, footprint
from orchestrator.memory.states import Group, States, shard_ranks, states
from train import shapes
from train.spec import TrainSpec

RNG_STATE_BYTES = 5056
"""State of the CPU's random numbers, which torch.utils.checkpoint keeps for each region that recomputes."""


class Sizes:
    """Sizes that all moments share."""

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.here: Setting = setting(spec)
        self.states: States = states(self.here)
        self.sharded = shard_ranks(spec.parallel) > 1
        self.ops: tuple[Op, ...] = block_ops(self.here)
        self.layers = spec.model.num_layers
        self.recomputed = spec.ckpt.layers_recomputed(self.layers)
        """Sorted."""
        hidden = self.here.hidden_bytes
        self.stored = cached_entries(spec)
        self.kept: Footprint = footprint(self.ops, hidden)
        self.again: Footprint = footprint(self.ops, hidden, self.stored) if self.recomputed else self.kept
        self.norm: Footprint = footprint(last_norm_ops(self.here), hidden)
        size = self.here.size
        self.logits = self.here.tokens * spec.model.vocab_size
        self.chunked = spec.train.loss == "chunked"
        self.head_grad = size(spec.model.vocab_size * spec.model.d_model * self.here.width)
        read = {name: size_bytes for name, _, _, size_bytes in inputs(self.here)}
        self.inputs_bytes = sum(read.values())
        # The batch and the angles stay through the optimizer's step, position ids and masks do not.
        self.batch_bytes = sum(read.get(name, 0) for name in ("tokens", "targets", "angles"))
        self.held_again = self.again.held_bytes + (0 if self.here.on_cuda else RNG_STATE_BYTES)
        # From the second micro-batch on, the gradients of the earlier ones are there.
        self.accumulated = self.states.gradient_bytes if spec.train.grad_accum > 1 else 0
        self.base: dict[str, int] = {
            "parameters": self.states.parameter_bytes,
            "optimizer_states": self.states.optimizer_bytes,
        }
        self.never = spec.parallel.reshard_after_forward == "never"
        always = spec.parallel.reshard_after_forward == "always"
        self.root_after_forward = 0 if always else self.states.root.unsharded_bytes

    def recomputes(self, layer: int) -> bool:
        """Whether this block runs again in backward."""
        at = bisect_left(self.recomputed, layer)
        return at < len(self.recomputed) and self.recomputed[at] == layer

    def held_below(self, layer: int) -> int:
        """Activations that the blocks before this one keep for backward, and what all blocks read."""
        again = bisect_left(self.recomputed, layer)
        return self.inputs_bytes + again * self.held_again + (layer - again) * self.kept.held_bytes

    def unsharded_blocks(self, layer: int) -> int:
        """Gathered parameters while this block works: its own, and those that were never let go."""
        return self.states.block.unsharded_bytes * (layer + 1 if self.never else 1)

    def reduced(self, blocks: int) -> int:
        """Sharded gradients when those of this many blocks have been reduced.

        With replicas, FSDP holds each group's all-reduced output to the end of backward (_all_reduce_state); where it
        was added to earlier gradients these are beside it.
        """
        outputs = blocks * self.states.block.gradient_bytes
        if not self.accumulated:
            return outputs
        return self.accumulated + (outputs if self.spec.parallel.shard != "fsdp" else 0)

    def while_gathering(self, group: Group) -> int:
        """Input and output of an all-gather under way, and the copy that gloo works on."""
        copy = group.gathered_bytes if self.sharded and not self.here.on_cuda else 0
        return group.gather_input_bytes + group.gathered_bytes + copy

    def reduce_input(self, group: Group) -> int:
        """Input of a reduce-scatter; gloo works on a copy of it.

        One rank has nothing to scatter. torch 2.9 asks gloo all the same, so that on CPU alone, and only where the
        root's reduction is the peak, its peak is higher than this by that copy.
        """
        return group.reduce_bytes * (2 if self.sharded and not self.here.on_cuda else 1)

    def layers_that_matter(self) -> list[int]:
        """Blocks of which one has the highest moment: the ends, and of each kind the best.

        Between the ends, moments of blocks of one kind differ only by what earlier blocks hold and later ones have
        given as gradients.
        """
        block, last = self.states.block, self.layers - 1
        grads = self.reduced(1) - self.reduced(0)
        slope = (block.unsharded_bytes if self.never else 0) - grads
        found = {0, 1, last - 1, last}
        for again in (True, False):
            best = latest = -1
            most = 0
            for layer in range(1, last):
                if self.recomputes(layer) is again:
                    latest = layer
                    here = self.held_below(layer) + layer * slope
                    if best < 0 or here > most:
                        best, most = layer, here
            found |= {best, latest}
        return sorted(layer for layer in found if 0 <= layer <= last)

    @property
    def recompute_flops_fraction(self) -> float:
        """FLOPs that recomputation adds, as a share of a step's without it.

        Of a recomputed block runs again what its policy did not keep, up to the last tensor that backward needs.
        """
        model, loop = self.spec.model, self.spec.train
        again = len(self.recomputed) * self.again.recomputed_flops
        return again / shapes.step_flops(model, loop.micro_batch, loop.seq_len)

    def largest_tensor_bytes(self) -> int:
        """The largest tensor of a step, parameters included."""
        logits = self.logits * FP32 // (shapes.LOSS_CHUNKS if self.chunked else 1)
        return max(logits, self.head_grad, self.states.largest_shard_bytes, *(op.output_bytes for op in self.ops))


def cached_entries(spec: TrainSpec) -> frozenset[str]:
    """The outputs that a recomputing block keeps."""
    return shapes.saved_ops(spec.model, spec.ckpt.save) if spec.ckpt.save is not None else frozenset()


def inputs(here: Setting) -> list[tuple[str, tuple[int, ...], str, int]]:
    """What is there from forward to backward whatever the blocks keep: name, dims, dtype, bytes.

    Tokens and targets, angles or position ids, and the mask of the embedding's dropout.
    """
    spec, size = here.spec, here.size
    dims = (spec.train.micro_batch, spec.train.seq_len)
    tokens = size(here.tokens * WIDTH["int64"])
    found: list[tuple[str, tuple[int, ...], str, int]] = [(n, dims, "int64", tokens) for n in ("tokens", "targets")]
    if spec.model.position == "rope":
        angles = (spec.train.seq_len, spec.model.head_dim)
        found.append(("angles", angles, "fp32", size(angles[0] * angles[1] * FP32)))
    else:
        found.append(("positions", dims[1:], "int64", size(dims[1] * WIDTH["int64"])))
    if spec.train.dropout:
        mask, dtype = (*dims, spec.model.d_model), "bool" if here.on_cuda else here.dtype
        found.append(("embedding_dropout.mask", mask, dtype, size(here.tokens * mask[-1] * WIDTH[dtype])))
    return found
