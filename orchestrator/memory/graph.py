"""A line of operations and the bytes that autograd holds while it runs forward, and then backward.

Takes Ops, gives a Footprint. The rules are autograd's own: an output lives until its last use or, when an operation
keeps it, until that operation's backward; a gradient lives until its operation's backward is done; two gradients of
one tensor are added into a third. tests/test_memory.py holds it against the tensors that are really alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of the forward pass and what its backward needs."""

    name: str
    inputs: tuple[str, ...]
    """Tensors that get a gradient."""
    output: str
    output_bytes: int
    keeps: tuple[str, ...] = ()
    """Inputs or the output, kept for backward."""
    hidden_bytes: int = 0
    """Made in forward besides the output and kept for backward."""
    forward_scratch_bytes: int = 0
    """Alive for a moment in forward, above all of these."""
    forward_only_bytes: int | None = None
    """All that it makes, at its highest, in a forward pass that keeps nothing; None: as if it kept."""
    backward_scratch_bytes: int = 0
    """Alive for a moment in backward, above the gradients of output and inputs."""
    parameter_grad_bytes: int = 0
    """Gradients of this operation's own parameters, which stay."""
    holds: tuple[str, ...] = ()
    """Alive in forward until this operation is done, as a calling frame names them."""
    passes_gradient: bool = False
    """Backward hands the output's gradient on as it is, as a sum does."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one line of operations; its first input counts, its parameters do not."""

    input_bytes: int
    output_bytes: int
    kept_bytes: int
    """Held between forward and backward when nothing is recomputed, the input included."""
    forward_peak_bytes: int
    """Highest in a forward pass that keeps what backward needs."""
    forward_only_peak_bytes: int
    """Highest in a forward pass that keeps nothing but the input."""
    backward_peak_bytes: int
    """Highest in backward, gradients of the parameters included, from a forward pass that kept all."""
    recompute_peak_bytes: int
    """The same where only the input was kept and the line runs again first."""
    parameter_grad_bytes: int
    """Gradients of the parameters, all together."""


def footprint(ops: Sequence[Op], input_bytes: int) -> Footprint:
    """Follow the tensors of `ops`, whose first tensor is `input`, forward and backward; bytes."""
    kept, forward_peak = _forward(ops, input_bytes, keep=True)
    _, forward_only_peak = _forward(ops, input_bytes, keep=False)
    backward_peak = _backward(ops, input_bytes, kept)
    output_bytes = ops[-1].output_bytes
    input_again = 0 if any("input" in op.keeps for op in ops) else input_bytes
    # Recomputation stops before the last operation that keeps something: its output is not needed again.
    last = max((i for i, op in enumerate(ops) if op.keeps or op.hidden_bytes), default=0)
    _, again_peak = _forward(ops[:last], input_bytes, keep=True, needed=ops[last].keeps)
    return Footprint(
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        kept_bytes=kept,
        forward_peak_bytes=forward_peak,
        forward_only_peak_bytes=forward_only_peak,
        backward_peak_bytes=backward_peak,
        recompute_peak_bytes=max(again_peak + output_bytes, backward_peak + input_again),
        parameter_grad_bytes=sum(op.parameter_grad_bytes for op in ops),
    )


def _sizes(ops: Sequence[Op], input_bytes: int) -> dict[str, int]:
    return {"input": input_bytes} | {op.output: op.output_bytes for op in ops}


def _forward(ops: Sequence[Op], input_bytes: int, *, keep: bool, needed: tuple[str, ...] = ()) -> tuple[int, int]:
    """Bytes left after the line, its output not counted unless kept, and the peak."""
    sizes = _sizes(ops, input_bytes)
    last_use = {name: i for i, op in enumerate(ops) for name in op.inputs + op.holds}
    kept = set(needed)
    alive = {"input"}
    hidden = peak = 0
    for i, op in enumerate(ops):
        alive.add(op.output)
        hidden += op.hidden_bytes
        if keep:
            kept |= set(op.keeps)
        live = hidden + sum(sizes[name] for name in alive)
        made = op.output_bytes + op.hidden_bytes + op.forward_scratch_bytes
        if not keep and op.forward_only_bytes is not None:
            made = op.forward_only_bytes
        peak = max(peak, live - op.output_bytes - op.hidden_bytes + made)
        if not keep:
            hidden -= op.hidden_bytes
        held = kept | {"input", op.output}  # the caller holds the input until the line is done
        alive -= {name for name in alive if name not in held and last_use.get(name, -1) <= i}
    left = hidden + sum(sizes[name] for name in alive if name in kept)
    return left, peak


@dataclass
class _Gradients:
    """Gradients alive, by tensor; a sum hands one storage to several names."""

    sizes: dict[str, int]
    storage: dict[str, int] = field(default_factory=dict)
    made: int = 0

    def live_bytes(self) -> int:
        return sum({key: self.sizes[name] for name, key in self.storage.items()}.values())

    def new(self, name: str) -> None:
        self.made += 1
        self.storage[name] = self.made


def _backward(ops: Sequence[Op], input_bytes: int, kept_bytes: int) -> int:
    sizes = _sizes(ops, input_bytes)
    first_keeper = {name: i for i, op in reversed(list(enumerate(ops))) for name in op.keeps}
    gradients = _Gradients(sizes)
    gradients.new(ops[-1].output)
    held, parameter_grads = kept_bytes, 0
    peak = held + gradients.live_bytes()
    for i, op in reversed(list(enumerate(ops))):
        before = held + parameter_grads + gradients.live_bytes()
        if op.passes_gradient:
            own = gradients.storage[op.output]
            arriving = dict.fromkeys(op.inputs, own)
            made = 0
        else:
            arriving = {}
            for name in op.inputs:
                gradients.made += 1
                arriving[name] = gradients.made
            made = sum(sizes[name] for name in op.inputs)
        parameter_grads += op.parameter_grad_bytes
        peak = max(peak, before + made + op.parameter_grad_bytes, before + op.backward_scratch_bytes)
        held -= op.hidden_bytes + sum(sizes[name] for name in set(op.keeps) if first_keeper[name] == i)
        del gradients.storage[op.output]
        for name, key in arriving.items():
            if name not in gradients.storage:
                gradients.storage[name] = key
                continue
            # Both gradients and their sum are alive for a moment.
            both = gradients.storage | {f"{name} again": key}
            live = sum({k: sizes[n.removesuffix(" again")] for n, k in both.items()}.values())
            peak = max(peak, held + parameter_grads + live + sizes[name])
            gradients.new(name)
    return peak
