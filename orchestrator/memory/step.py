"""The moments of one optimizer step at which memory may be highest, each with what is alive then.

Takes a TrainSpec, gives Moments of rank 0, in order. Follows train/parallel.py and train/loop.py: FSDP2 groups are the
blocks and the root, the root stays gathered, backward gathers the next group ahead. It must not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.memory.block import Setting, block_ops, last_norm_ops, setting
from orchestrator.memory.estimate import Phase
from orchestrator.memory.graph import Footprint, footprint
from orchestrator.memory.states import FP32, Group, States, states
from train.spec import TrainSpec

_TOKEN_BYTES = 2 * 8
"""Input and target of a token, int64."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is alive at one moment, bytes."""

    phase: Phase
    name: str
    parameters: int
    optimizer_states: int
    gradients: int = 0
    """Sharded, fp32."""
    gathered_parameters: int = 0
    """Unsharded parameters and all-gather buffers."""
    gradient_buffers: int = 0
    """Unsharded gradients of the group at work and reduce-scatter buffers."""
    activations: int = 0
    loss: int = 0
    """Logits, log-probabilities and their gradients."""
    scratch: int = 0
    """The optimizer's intermediates."""

    def terms(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.terms().values())


class _Step:
    """Sizes that all moments share."""

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.here: Setting = setting(spec)
        self.states: States = states(spec, self.here.width)
        self.sharded = spec.parallel.world_size > 1
        self.block: Footprint = footprint(block_ops(self.here), self.here.hidden_bytes)
        self.norm: Footprint = footprint(last_norm_ops(self.here), self.here.hidden_bytes)
        self.layers = spec.model.num_layers
        self.recomputed = frozenset(spec.ckpt.layers_recomputed(self.layers))
        self.logits = self.here.tokens * spec.model.vocab_size
        self.embedding_grad = spec.model.vocab_size * spec.model.d_model * self.here.width
        angles = spec.train.seq_len * spec.model.head_dim * FP32 if spec.model.position == "rope" else 0
        self.inputs_bytes = self.here.tokens * _TOKEN_BYTES + angles
        # From the second micro-batch on, the gradients of the earlier ones are there.
        self.accumulated = self.states.gradient_bytes if spec.train.grad_accum > 1 else 0

    def kept_below(self, layer: int) -> int:
        """Activations that the blocks before `layer` keep for backward, and what all blocks read."""
        full = sum(1 for i in self.recomputed if i < layer)
        return self.inputs_bytes + full * self.block.input_bytes + (layer - full) * self.block.kept_bytes

    def base(self) -> dict[str, int]:
        return {"parameters": self.states.parameter_bytes, "optimizer_states": self.states.optimizer_bytes}

    def ahead(self, group: Group) -> int:
        """Output of an all-gather whose copy into parameters is to come; none on one rank."""
        return group.unsharded_bytes if self.sharded else 0

    def gather_input(self, group: Group) -> int:
        """The rank's rows, cast for the all-gather; fp32 rows are sent as they are."""
        return group.sharded_bytes * self.here.width // FP32 if self.sharded and self.here.width < FP32 else 0

    def reduce(self, group: Group) -> int:
        """Reduce-scatter of a group at its peak: input and output; gloo works on a copy of the input."""
        output = group.sharded_bytes
        copy = group.reduce_bytes if self.sharded and not self.here.on_cuda else 0
        return group.reduce_bytes + copy + output


def moments(spec: TrainSpec) -> tuple[Moment, ...]:
    """The moments of one step from the second on, with the last micro-batch's when there are several."""
    step = _Step(spec)
    return (
        Moment(phase="init", name="all parameters made", parameters=step.states.parameter_bytes, optimizer_states=0),
        *_forward(step),
        *_loss(step),
        *_backward(step),
        Moment(
            phase="optimizer_step",
            name="AdamW",
            **step.base(),
            gradients=step.states.gradient_bytes,
            activations=step.inputs_bytes,
            scratch=step.states.optimizer_step_scratch_bytes,
        ),
        # torch makes AdamW's states by a step with gradients of zero, then fills them from the files.
        Moment(
            phase="resume",
            name="making optimizer states",
            **step.base(),
            gradients=step.states.gradient_bytes,
            scratch=step.states.optimizer_step_scratch_bytes,
        ),
        Moment(
            phase="resume",
            name="reading a checkpoint",
            **step.base(),
            scratch=2 * step.states.largest_shard_bytes,
        ),
    )


def _forward(step: _Step) -> Iterator[Moment]:
    root, block = step.states.root, step.states.block
    for layer in range(step.layers):
        again = layer in step.recomputed
        peak = step.block.forward_only_peak_bytes if again else step.block.forward_peak_bytes
        yield Moment(
            phase="forward",
            name=f"block {layer}",
            **step.base(),
            gradients=step.accumulated,
            gathered_parameters=root.unsharded_bytes + block.unsharded_bytes + step.ahead(block),
            activations=step.kept_below(layer) + peak,
        )
    yield Moment(
        phase="forward",
        name="logits",
        **step.base(),
        gradients=step.accumulated,
        gathered_parameters=root.unsharded_bytes + step.ahead(block),
        activations=step.kept_below(step.layers) + step.norm.kept_bytes + step.norm.output_bytes,
        loss=step.logits * step.here.width,
    )


def _loss(step: _Step) -> Iterator[Moment]:
    """Full logits: their fp32 copy where they are not fp32, log-probabilities, and two gradients of that size."""
    width, root, block = step.here.width, step.states.root, step.states.block
    held = step.kept_below(step.layers) + step.norm.kept_bytes + step.norm.output_bytes
    copy = FP32 if width < FP32 else 0
    rest = {**step.base(), "gradients": step.accumulated, "activations": held}
    gathered = root.unsharded_bytes
    yield Moment(
        phase="forward",
        name="cross-entropy",
        **rest,
        gathered_parameters=gathered,
        loss=step.logits * (width + copy + FP32),
    )
    yield Moment(
        phase="backward",
        name="cross-entropy",
        **rest,
        gathered_parameters=gathered,
        loss=step.logits * 3 * FP32,
    )
    yield Moment(
        phase="backward",
        name="head",
        **(rest | {"activations": held + step.here.hidden_bytes}),
        gathered_parameters=gathered + step.ahead(block) + step.gather_input(block),
        gradient_buffers=step.embedding_grad,
        loss=step.logits * width,
    )
    if width < FP32:
        yield Moment(
            phase="backward",
            name="gradient of the logits cast",
            **rest,
            gathered_parameters=gathered,
            loss=step.logits * (FP32 + width),
        )
    yield Moment(
        phase="backward",
        name="last norm",
        **(rest | {"activations": step.kept_below(step.layers) + step.norm.backward_peak_bytes}),
        gathered_parameters=gathered + step.ahead(block),
        gradient_buffers=step.embedding_grad,
    )


def _backward(step: _Step) -> Iterator[Moment]:
    root, block = step.states.root, step.states.block
    root_grads = step.embedding_grad + step.norm.parameter_grad_bytes
    for layer in reversed(range(step.layers)):
        reduced = (step.layers - 1 - layer) * block.sharded_bytes
        # The input of the last reduce-scatter stays until the next one.
        before = block.reduce_bytes if layer < step.layers - 1 else 0
        ahead = step.ahead(block) if layer > 0 else 0
        again = layer in step.recomputed
        peak = step.block.recompute_peak_bytes if again else step.block.backward_peak_bytes
        rest = {**step.base(), "gradients": step.accumulated or reduced}
        yield Moment(
            phase="backward",
            name=f"block {layer}" + (", recomputed" if again else ""),
            **rest,
            gathered_parameters=root.unsharded_bytes + block.unsharded_bytes + ahead,
            gradient_buffers=root_grads + before,
            activations=step.kept_below(layer) + peak,
        )
        yield Moment(
            phase="backward",
            name=f"reduce-scatter of block {layer}",
            **rest,
            gathered_parameters=root.unsharded_bytes + ahead,
            gradient_buffers=root_grads + step.reduce(block),
            activations=step.kept_below(layer) + step.here.hidden_bytes,
        )
    tied = step.embedding_grad if step.spec.model.tie_embeddings else 0
    all_root_grads = root.unsharded_bytes
    yield Moment(
        phase="backward",
        name="embedding",
        **step.base(),
        gradients=step.accumulated or step.layers * block.sharded_bytes,
        gathered_parameters=root.unsharded_bytes,
        gradient_buffers=all_root_grads + tied + block.reduce_bytes,
        activations=step.kept_below(0) + step.here.hidden_bytes,
    )
    yield Moment(
        phase="backward",
        name="reduce-scatter of the root",
        **step.base(),
        gradients=step.accumulated or step.layers * block.sharded_bytes,
        gradient_buffers=max(all_root_grads + root.reduce_bytes, step.reduce(root)),
        activations=step.kept_below(0),
    )
