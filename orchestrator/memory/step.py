"""The moments of one optimizer step at which memory may be highest, each with what is alive then.

Takes Sizes, gives Moments of rank 0, in order. Follows train/parallel.py and train/loop.py: FSDP2 groups are the blocks
and the root, backward gathers the next group ahead. It must not import torch.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from orchestrator.memory.block import FP32
from orchestrator.memory.estimate import Phase
from orchestrator.memory.sizes import Sizes
from orchestrator.memory.states import Group
from train import shapes
from train.spec import TrainSpec


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


def moments(spec: TrainSpec) -> tuple[Moment, ...]:
    """The moments of one step from the second on, with the last micro-batch's when there are several."""
    sizes = Sizes(spec)
    return moments_of(sizes, range(sizes.layers))


def moments_of(sizes: Sizes, layers: Sequence[int]) -> tuple[Moment, ...]:
    """The same, of the blocks only these; `Sizes.layers_that_matter` are those among which the highest is."""
    scratch = sizes.states.optimizer_step_scratch_bytes
    updating: dict[str, Any] = sizes.base | {"gradients": sizes.states.gradient_bytes, "scratch": scratch}
    return (
        Moment(phase="init", name="all parameters made", parameters=sizes.states.parameter_bytes, optimizer_states=0),
        *_forward(sizes, layers),
        *(_chunked_loss(sizes) if sizes.chunked else _loss(sizes)),
        *_backward(sizes, layers),
        Moment(phase="optimizer_step", name="AdamW", activations=sizes.batch_bytes, **updating),
        # torch makes AdamW's states by a step with gradients of zero, then fills them from the files.
        Moment(phase="resume", name="making optimizer states", **updating),
        Moment(phase="resume", name="reading a checkpoint", scratch=2 * sizes.states.largest_shard_bytes, **sizes.base),
    )


def _forward(sizes: Sizes, layers: Sequence[int]) -> Iterator[Moment]:
    root, block = sizes.states.root, sizes.states.block
    rest: dict[str, Any] = {"phase": "forward", **sizes.base, "gradients": sizes.accumulated}
    yield Moment(
        name="gathering the root",
        gathered_parameters=0 if sizes.sharded else root.unsharded_bytes + root.cast_bytes,
        all_gather_buffers=sizes.while_gathering(root),
        activations=sizes.inputs_bytes,
        **rest,
    )
    for layer in layers:
        gathered = root.unsharded_bytes + sizes.unsharded_blocks(layer)
        if sizes.sharded or block.cast_bytes:
            # The group before's buffer is let go when this one's has arrived.
            yield Moment(
                name=f"gathering block {layer}",
                gathered_parameters=gathered + (-block.unsharded_bytes if sizes.sharded else block.cast_bytes),
                all_gather_buffers=(block if layer else root).gathered_bytes + sizes.while_gathering(block),
                activations=sizes.held_below(layer) + sizes.here.hidden_bytes,
                **rest,
            )
        peak = (sizes.again if sizes.recomputes(layer) else sizes.kept).forward_peak_bytes
        yield Moment(
            name=f"block {layer}",
            gathered_parameters=gathered,
            all_gather_buffers=block.gathered_bytes,
            activations=sizes.held_below(layer) + peak,
            **rest,
        )


def _after_blocks(sizes: Sizes, root_bytes: int, *, last_buffer: bool = False) -> dict[str, Any]:
    """What is alive between the blocks' forward and backward."""
    block = sizes.states.block
    kept = sizes.layers * block.unsharded_bytes if sizes.never else 0
    return {
        **sizes.base,
        "gradients": sizes.accumulated,
        "gathered_parameters": root_bytes + kept,
        "all_gather_buffers": block.gathered_bytes if last_buffer else 0,
    }


def _loss(sizes: Sizes) -> Iterator[Moment]:
    """Full logits: their fp32 copy where they are not fp32, log-probabilities, and two gradients of that size."""
    width, root, block, size = sizes.here.width, sizes.states.root, sizes.states.block, sizes.here.size
    norm_output = sizes.norm.output_bytes
    held = sizes.held_below(sizes.layers) + sizes.norm.held_bytes + norm_output
    logits, in_fp32 = size(sizes.logits * width), size(sizes.logits * FP32)
    copy = in_fp32 if width < FP32 else 0
    after = _after_blocks(sizes, sizes.root_after_forward) | {"activations": held, "idle": _freed_in_forward(sizes)}
    # A block of logits in bf16 is half of what a gradient in fp32 asks for.
    idle = after["idle"] + (logits if copy and sizes.here.on_cuda else 0)
    yield Moment(
        phase="forward",
        name="logits",
        **(_after_blocks(sizes, root.unsharded_bytes, last_buffer=True) | {"activations": held}),
        loss=logits,
    )
    yield Moment(phase="forward", name="cross-entropy", **after, loss=logits + copy + in_fp32)
    yield Moment(phase="backward", name="cross-entropy", **(after | {"idle": idle}), loss=3 * in_fp32)
    if width < FP32:
        yield Moment(phase="backward", name="gradient of the logits cast", **after, loss=in_fp32 + logits)
    yield from _head(sizes, held, logits)
    yield Moment(
        phase="backward",
        name="last norm",
        **_gathering(sizes, block.gathered_bytes),
        activations=sizes.held_below(sizes.layers) + sizes.norm.backward_peak_bytes,
        gradient_buffers=sizes.head_grad,
    )


def _freed_in_forward(sizes: Sizes) -> int:
    """What a block frees in forward, where each tensor of it is too small for the logits in fp32; 0 off CUDA.

    A freed block serves only requests that are no larger, and neighbours merge inside a segment alone, which from
    10 MiB on holds one tensor (c10/cuda/CUDACachingAllocator.cpp).
    """
    largest = max(op.output_bytes for op in sizes.ops)
    if not sizes.here.on_cuda or sizes.logits * FP32 <= largest:
        return 0
    block = sizes.again if sizes.recomputes(sizes.layers - 1) else sizes.kept
    return max(0, block.forward_peak_bytes - block.held_bytes - block.output_bytes)


def _gathering(sizes: Sizes, buffers: int) -> dict[str, Any]:
    """Backward before the blocks: the root is gathered, and the last block on its way."""
    return _after_blocks(sizes, sizes.states.root.unsharded_bytes) | {
        "all_gather_buffers": 0 if sizes.never else buffers
    }


def _head(sizes: Sizes, held: int, logits: int) -> Iterator[Moment]:
    root, block = sizes.states.root, sizes.states.block
    yield Moment(
        phase="backward",
        name="head",
        **_gathering(sizes, sizes.while_gathering(block)),
        activations=held + sizes.here.hidden_bytes,
        gradient_buffers=sizes.head_grad,
        loss=logits,
    )
    if sizes.root_after_forward == 0:
        yield Moment(
            phase="backward",
            name="gathering the root again",
            **(_after_blocks(sizes, root.unsharded_bytes) | {"all_gather_buffers": root.gathered_bytes}),
            activations=held,
            loss=logits,
        )


def _chunked_loss(sizes: Sizes) -> Iterator[Moment]:
    """Logits of a slice of the tokens in fp32, with their copy in bf16; the gradients are made in forward.

    Source: train/loss.py. Between forward and backward the gradients of its input and of the head's matrix are held.
    """
    here, root, block = sizes.here, sizes.states.root, sizes.states.block
    tokens = -(-here.tokens // shapes.LOSS_CHUNKS)
    numbers = tokens * sizes.spec.model.vocab_size
    slice_bytes = here.size(numbers * FP32) + (here.size(numbers * here.width) if here.width < FP32 else 0)
    held = sizes.held_below(sizes.layers) + sizes.norm.held_bytes
    gradients = {"gradient_buffers": sizes.head_grad, "activations": held + here.hidden_bytes}
    yield Moment(
        phase="forward",
        name="cross-entropy of a slice",
        **_after_blocks(sizes, root.unsharded_bytes, last_buffer=True),
        **(gradients | {"activations": held + sizes.norm.output_bytes + here.hidden_bytes}),
        loss=slice_bytes,
    )
    yield Moment(phase="backward", name="before the blocks", **_gathering(sizes, block.gathered_bytes), **gradients)
    yield Moment(
        phase="backward",
        name="last norm",
        **_gathering(sizes, block.gathered_bytes),
        activations=sizes.held_below(sizes.layers) + sizes.norm.backward_peak_bytes,
        gradient_buffers=sizes.head_grad,
    )


def _backward(sizes: Sizes, layers: Sequence[int]) -> Iterator[Moment]:
    root, block, last = sizes.states.root, sizes.states.block, sizes.layers - 1
    root_grads = sizes.head_grad + sizes.norm.parameter_grad_bytes
    for layer in reversed(layers):
        reduced = sizes.reduced(last - layer)
        # The input of the last reduce-scatter stays until the next one.
        before = block.reduce_bytes if layer < last else 0
        again = sizes.recomputes(layer)
        peak = (sizes.again if again else sizes.kept).backward_peak_bytes
        rest: dict[str, Any] = {"phase": "backward", **sizes.base}
        gathered = root.unsharded_bytes + sizes.unsharded_blocks(layer)
        ahead = sizes.sharded and not sizes.never and layer > 0
        if ahead or block.cast_bytes:
            yield Moment(
                name=f"gathering block {layer - 1} ahead" if ahead else f"gathering block {layer} again",
                gradients=reduced,
                gathered_parameters=gathered + block.cast_bytes,
                gradient_buffers=root_grads + before,
                all_gather_buffers=sizes.while_gathering(block),
                activations=sizes.held_below(layer + 1) + sizes.here.hidden_bytes,
                **rest,
            )
        rest["all_gather_buffers"] = block.gathered_bytes if ahead else 0
        yield Moment(
            name=f"block {layer}" + (", recomputed" if again else ""),
            gradients=reduced,
            gathered_parameters=gathered,
            gradient_buffers=root_grads + before,
            activations=sizes.held_below(layer) + peak,
            **rest,
        )
        rest |= {
            "gathered_parameters": gathered - block.unsharded_bytes,
            "activations": sizes.held_below(layer) + sizes.here.hidden_bytes,
        }
        yield from _reduction(sizes, block, f"block {layer}", reduced, root_grads, rest)
    yield from _root_backward(sizes, sizes.reduced(sizes.layers))


def _root_backward(sizes: Sizes, reduced: int) -> Iterator[Moment]:
    """The embedding, whose gradient a tied head's is added to, and the root's reduce-scatter."""
    root, block = sizes.states.root, sizes.states.block
    tied = sizes.head_grad if sizes.spec.model.tie_embeddings else 0
    # The sum is a third matrix, but for the chunked loss, whose gradient autograd has for itself and adds to in place.
    third = 0 if sizes.chunked else tied
    rest: dict[str, Any] = {"phase": "backward", **sizes.base}
    yield Moment(
        name="embedding",
        gradients=reduced,
        gathered_parameters=root.unsharded_bytes,
        gradient_buffers=root.unsharded_bytes + tied + third + block.reduce_bytes,
        activations=sizes.held_below(0) + (0 if third else sizes.here.hidden_bytes),
        **rest,
    )
    yield from _reduction(sizes, root, "the root", reduced, 0, rest | {"activations": sizes.held_below(0)})


def _reduction(
    sizes: Sizes, group: Group, name: str, reduced: int, other_buffers: int, rest: dict[str, Any]
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
        gradient_buffers=other_buffers + sizes.reduce_input(group) + group.last_gradient_bytes,
        **rest,
    )
