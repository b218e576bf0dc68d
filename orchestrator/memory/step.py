"""The moments of one optimizer step at which memory may be highest, each with what is alive then.

Takes a TrainSpec, gives Moments of rank 0, in order. Follows train/parallel.py and train/loop.py: FSDP2 groups are the
blocks and the root, backward gathers the next group ahead. It must not import torch.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from orchestrator.memory.block import FP32, WIDTH, Setting, block_ops, last_norm_ops, setting
from orchestrator.memory.estimate import Phase
from orchestrator.memory.graph import Footprint, Op, footprint
from orchestrator.memory.states import Group, States, shard_ranks, states
from train import shapes
from train.spec import TrainSpec

RNG_STATE_BYTES = 5056
"""State of the CPU's random numbers, which torch.utils.checkpoint keeps for each region that recomputes."""


class Moment(NamedTuple):
    """What is alive at one moment, bytes."""

    phase: Phase
    name: str
    parameters: int
    optimizer_states: int
    gradients: int = 0
    """Sharded; of the reduce-scatter's stream."""
    gathered_parameters: int = 0
    """Unsharded parameters."""
    all_gather_buffers: int = 0
    """Of the all-gather's copy-in stream."""
    gradient_buffers: int = 0
    """Unsharded gradients of the group at work and the reduce-scatter's input."""
    activations: int = 0
    loss: int = 0
    """Logits, log-probabilities and their gradients."""
    scratch: int = 0
    """The optimizer's intermediates."""
    idle: int = 0
    """Not alive: freed blocks that CUDA's allocator holds, each too small for what is asked for at this moment."""

    def terms(self) -> dict[str, int]:
        """Bytes alive, by what they are for."""
        return dict(zip(self._fields[2:-1], self[2:-1], strict=True))

    @property
    def total_bytes(self) -> int:
        """Bytes alive, all together."""
        return sum(self[2:-1])

    @property
    def main_stream_bytes(self) -> int:
        """What the allocator holds for the stream of computation."""
        return sum(self[2:]) - self.gradients - self.all_gather_buffers


class Step:
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
        self.inputs_bytes = sum(size_bytes for _, _, _, size_bytes in inputs(self.here))
        # The batch and the angles stay through the optimizer's step, position ids and masks do not.
        staying = ("tokens", "targets", "angles")
        self.batch_bytes = sum(size_bytes for name, _, _, size_bytes in inputs(self.here) if name in staying)
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
        grads = 0 if self.accumulated else block.gradient_bytes
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


def moments(spec: TrainSpec) -> tuple[Moment, ...]:
    """The moments of one step from the second on, with the last micro-batch's when there are several."""
    step = Step(spec)
    return moments_of(step, range(step.layers))


def moments_of(step: Step, layers: Sequence[int]) -> tuple[Moment, ...]:
    """The same, of the blocks only these; `Step.layers_that_matter` are those among which the highest is."""
    scratch = step.states.optimizer_step_scratch_bytes
    updating: dict[str, Any] = step.base | {"gradients": step.states.gradient_bytes, "scratch": scratch}
    return (
        Moment(phase="init", name="all parameters made", parameters=step.states.parameter_bytes, optimizer_states=0),
        *_forward(step, layers),
        *(_chunked_loss(step) if step.chunked else _loss(step)),
        *_backward(step, layers),
        Moment(phase="optimizer_step", name="AdamW", activations=step.batch_bytes, **updating),
        # torch makes AdamW's states by a step with gradients of zero, then fills them from the files.
        Moment(phase="resume", name="making optimizer states", **updating),
        Moment(phase="resume", name="reading a checkpoint", scratch=2 * step.states.largest_shard_bytes, **step.base),
    )


def _forward(step: Step, layers: Sequence[int]) -> Iterator[Moment]:
    root, block = step.states.root, step.states.block
    rest: dict[str, Any] = {"phase": "forward", **step.base, "gradients": step.accumulated}
    yield Moment(
        name="gathering the root",
        gathered_parameters=root.unsharded_bytes,
        all_gather_buffers=root.gathered_bytes + block.gather_input_bytes + block.gathered_bytes,
        activations=step.inputs_bytes + step.here.hidden_bytes,
        **rest,
    )
    for layer in layers:
        peak = (step.again if step.recomputes(layer) else step.kept).forward_peak_bytes
        yield Moment(
            name=f"block {layer}",
            gathered_parameters=root.unsharded_bytes + step.unsharded_blocks(layer),
            all_gather_buffers=block.gathered_bytes,
            activations=step.held_below(layer) + peak,
            **rest,
        )


def _after_blocks(step: Step, root_bytes: int, *, last_buffer: bool = False) -> dict[str, Any]:
    """What is alive between the blocks' forward and backward."""
    block = step.states.block
    kept = step.layers * block.unsharded_bytes if step.never else 0
    return {
        **step.base,
        "gradients": step.accumulated,
        "gathered_parameters": root_bytes + kept,
        "all_gather_buffers": block.gathered_bytes if last_buffer else 0,
    }


def _loss(step: Step) -> Iterator[Moment]:
    """Full logits: their fp32 copy where they are not fp32, log-probabilities, and two gradients of that size."""
    width, root, block, size = step.here.width, step.states.root, step.states.block, step.here.size
    norm_output = step.norm.output_bytes
    held = step.held_below(step.layers) + step.norm.held_bytes + norm_output
    logits, in_fp32 = size(step.logits * width), size(step.logits * FP32)
    copy = in_fp32 if width < FP32 else 0
    after = _after_blocks(step, step.root_after_forward) | {"activations": held, "idle": _freed_in_forward(step)}
    # A block of logits in bf16 is half of what a gradient in fp32 asks for.
    idle = after["idle"] + (logits if copy and step.here.on_cuda else 0)
    yield Moment(
        phase="forward",
        name="logits",
        **(_after_blocks(step, root.unsharded_bytes, last_buffer=True) | {"activations": held}),
        loss=logits,
    )
    yield Moment(phase="forward", name="cross-entropy", **after, loss=logits + copy + in_fp32)
    yield Moment(phase="backward", name="cross-entropy", **(after | {"idle": idle}), loss=3 * in_fp32)
    if width < FP32:
        yield Moment(phase="backward", name="gradient of the logits cast", **after, loss=in_fp32 + logits)
    yield from _head(step, held, logits)
    yield Moment(
        phase="backward",
        name="last norm",
        **_gathering(step, block.gathered_bytes),
        activations=step.held_below(step.layers) + step.norm.backward_peak_bytes,
        gradient_buffers=step.head_grad,
    )


def _freed_in_forward(step: Step) -> int:
    """What a block frees in forward, where each tensor of it is too small for the logits in fp32; 0 off CUDA.

    A freed block serves only requests that are no larger, and neighbours merge inside a segment alone, which from
    10 MiB on holds one tensor (c10/cuda/CUDACachingAllocator.cpp).
    """
    largest = max(op.output_bytes for op in step.ops)
    if not step.here.on_cuda or step.logits * FP32 <= largest:
        return 0
    block = step.again if step.recomputes(step.layers - 1) else step.kept
    return max(0, block.forward_peak_bytes - block.held_bytes - block.output_bytes)


def _gathering(step: Step, buffers: int) -> dict[str, Any]:
    """Backward before the blocks: the root is gathered, and the last block on its way."""
    return _after_blocks(step, step.states.root.unsharded_bytes) | {"all_gather_buffers": 0 if step.never else buffers}


def _head(step: Step, held: int, logits: int) -> Iterator[Moment]:
    root, block = step.states.root, step.states.block
    buffers = block.gathered_bytes + block.gather_input_bytes
    yield Moment(
        phase="backward",
        name="head",
        **_gathering(step, buffers),
        activations=held + step.here.hidden_bytes,
        gradient_buffers=step.head_grad,
        loss=logits,
    )
    if step.root_after_forward == 0:
        yield Moment(
            phase="backward",
            name="gathering the root again",
            **(_after_blocks(step, root.unsharded_bytes) | {"all_gather_buffers": root.gathered_bytes}),
            activations=held,
            loss=logits,
        )


def _chunked_loss(step: Step) -> Iterator[Moment]:
    """Logits of a slice of the tokens in fp32, with their copy in bf16; the gradients are made in forward.

    Source: train/loss.py. Between forward and backward the gradients of its input and of the head's matrix are held.
    """
    here, root, block = step.here, step.states.root, step.states.block
    tokens = -(-here.tokens // shapes.LOSS_CHUNKS)
    numbers = tokens * step.spec.model.vocab_size
    slice_bytes = here.size(numbers * FP32) + (here.size(numbers * here.width) if here.width < FP32 else 0)
    held = step.held_below(step.layers) + step.norm.held_bytes
    gradients = {"gradient_buffers": step.head_grad, "activations": held + here.hidden_bytes}
    yield Moment(
        phase="forward",
        name="cross-entropy of a slice",
        **_after_blocks(step, root.unsharded_bytes, last_buffer=True),
        **(gradients | {"activations": held + step.norm.output_bytes + here.hidden_bytes}),
        loss=slice_bytes,
    )
    yield Moment(phase="backward", name="before the blocks", **_gathering(step, block.gathered_bytes), **gradients)
    yield Moment(
        phase="backward",
        name="last norm",
        **_gathering(step, block.gathered_bytes),
        activations=step.held_below(step.layers) + step.norm.backward_peak_bytes,
        gradient_buffers=step.head_grad,
    )


def _backward(step: Step, layers: Sequence[int]) -> Iterator[Moment]:
    root, block, last = step.states.root, step.states.block, step.layers - 1
    root_grads = step.head_grad + step.norm.parameter_grad_bytes
    for layer in reversed(layers):
        reduced = step.accumulated or (last - layer) * block.gradient_bytes
        # The input of the last reduce-scatter stays until the next one.
        before = block.reduce_bytes if layer < last else 0
        again = step.recomputes(layer)
        peak = (step.again if again else step.kept).backward_peak_bytes
        rest: dict[str, Any] = {"phase": "backward", **step.base}
        rest["all_gather_buffers"] = 0 if step.never or layer == 0 else block.gathered_bytes
        yield Moment(
            name=f"block {layer}" + (", recomputed" if again else ""),
            gradients=reduced,
            gathered_parameters=root.unsharded_bytes + step.unsharded_blocks(layer),
            gradient_buffers=root_grads + before,
            activations=step.held_below(layer) + peak,
            **rest,
        )
        rest |= {
            "gathered_parameters": root.unsharded_bytes + step.unsharded_blocks(layer) - block.unsharded_bytes,
            "activations": step.held_below(layer) + step.here.hidden_bytes,
        }
        yield from _reduction(step, block, f"block {layer}", reduced, root_grads, rest)
    yield from _root_backward(step, step.accumulated or step.layers * block.gradient_bytes)


def _root_backward(step: Step, reduced: int) -> Iterator[Moment]:
    """The embedding, whose gradient a tied head's is added to, and the root's reduce-scatter."""
    root, block = step.states.root, step.states.block
    tied = step.head_grad if step.spec.model.tie_embeddings else 0
    # autograd adds in place what it made itself; what the chunked loss made is added into a third.
    third = tied if step.chunked else 0
    rest: dict[str, Any] = {"phase": "backward", **step.base}
    yield Moment(
        name="embedding",
        gradients=reduced,
        gathered_parameters=root.unsharded_bytes,
        gradient_buffers=root.unsharded_bytes + tied + third + block.reduce_bytes,
        activations=step.held_below(0) + (0 if third else step.here.hidden_bytes),
        **rest,
    )
    yield from _reduction(step, root, "the root", reduced, 0, rest | {"activations": step.held_below(0)})


def _reduction(
    step: Step, group: Group, name: str, reduced: int, other_buffers: int, rest: dict[str, Any]
) -> Iterator[Moment]:
    """A group's gradients are copied into the input of its reduce-scatter, then freed, then the output is made."""
    yield Moment(
        name=f"gradients of {name} copied",
        gradients=reduced,
        gradient_buffers=other_buffers + group.unsharded_bytes + group.reduce_bytes,
        **rest,
    )
    yield Moment(
        name=f"reduce-scatter of {name}",
        gradients=reduced + group.gradient_bytes,
        gradient_buffers=other_buffers + step.reduce_input(group),
        **rest,
    )
