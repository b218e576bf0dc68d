"""A line of operations and the bytes that autograd holds while it runs forward, and then backward.

Takes Ops, gives a Footprint. The rules are autograd's own: an output lives until its last use or, when an operation
keeps it, until that operation's backward; a gradient lives until its operation's backward is done; two gradients of
one tensor are added into a third. A line that recomputes keeps its input and the outputs that its policy names, runs
again when its backward begins, and stops as soon as it has every saved tensor back (torch/utils/checkpoint.py).
tests/test_memory.py holds it against the tensors that are really alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

INPUT = "input"
"""Name of a line's first tensor."""


class Saved(NamedTuple):
    """A tensor that an operation makes for its backward, besides its output."""

    name: str
    dims: tuple[int, ...]
    dtype: str
    size_bytes: int


class Op(NamedTuple):
    """One operation of the forward pass and what its backward needs; a NamedTuple, as thousands are made a second."""

    output: str
    """Its name, and that of the tensor it makes."""
    kind: str
    """What it computes, as torch calls it."""
    inputs: tuple[str, ...]
    """Tensors that get a gradient."""
    dims: tuple[int, ...]
    dtype: str
    output_bytes: int
    keeps: tuple[str, ...] = ()
    """Inputs or the output, kept for backward."""
    hidden: tuple[Saved, ...] = ()
    """Made in forward besides the output and kept for backward."""
    entry: str = ""
    """The name by which a policy may keep its output; empty: it cannot."""
    flops: int = 0
    """Of its forward."""
    forward_scratch_bytes: int = 0
    """Alive for a moment in forward, above all of these."""
    forward_only_less_bytes: int = 0
    """Gone by then in a forward that keeps nothing for backward."""
    backward_scratch_bytes: int = 0
    """Alive for a moment in backward, above the gradients of output and inputs."""
    parameter_grad_bytes: int = 0
    """Gradients of this operation's own parameters, which stay."""
    holds: tuple[str, ...] = ()
    """Alive in forward until this operation is done, as a calling frame names them."""
    passes_gradient: bool = False
    """Backward hands the output's gradient on as it is, as a sum does."""
    backward_is_view: bool = False
    """Backward makes nothing: the gradient is the output's in another shape."""

    @property
    def hidden_bytes(self) -> int:
        """Of all tensors made for backward besides the output."""
        return sum(saved.size_bytes for saved in self.hidden)

    @property
    def saves_before_it_computes(self) -> bool:
        """Autograd takes inputs before the kernel runs, outputs after it."""
        return not self.hidden and self.output not in self.keeps


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one line of operations; its first input counts, its parameters do not."""

    input_bytes: int
    output_bytes: int
    held_bytes: int
    """Held between forward and backward, the input included where it is held."""
    forward_peak_bytes: int
    """Highest in forward."""
    backward_peak_bytes: int
    """Highest in backward, recomputation and gradients of the parameters included."""
    parameter_grad_bytes: int
    """Gradients of the parameters, all together."""
    recomputed_flops: int
    """Of the operations that run again."""


def footprint(ops: Sequence[Op], input_bytes: int, cached: frozenset[str] | None = None) -> Footprint:
    """Follow the tensors of `ops`, whose first tensor is `input`, forward and backward; bytes.

    `cached` None: autograd keeps what it needs. Otherwise the line recomputes and keeps its input and the outputs of
    the operations whose entry is named; an empty set is plain checkpointing.
    """
    line = _Line(ops, input_bytes)
    if cached is None:
        held, forward_peak = line.forward(len(ops), line.kept_by(len(ops)))
        backward_peak, flops = line.backward(held), 0
    else:
        stores = line.stores(cached)
        stored = sum(stores.values())
        _, forward_peak = line.forward(len(ops), frozenset({INPUT}), without_hidden=True, stores=stores)
        held = input_bytes + stored
        backward_peak, flops = line.recompute(stores)
    return Footprint(
        input_bytes=input_bytes,
        output_bytes=ops[-1].output_bytes,
        held_bytes=held,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        parameter_grad_bytes=sum(op.parameter_grad_bytes for op in ops),
        recomputed_flops=flops,
    )


def last_to_run_again(ops: Sequence[Op]) -> int:
    """Index of the operation at which a recomputation has all saved tensors back."""
    return max((i for i, op in enumerate(ops) if op.keeps or op.hidden), default=0)


def recomputed(ops: Sequence[Op], cached: frozenset[str]) -> tuple[str, ...]:
    """Names of the operations that run again when only the input and the `cached` entries were kept."""
    last = last_to_run_again(ops)
    end = last if ops[last].saves_before_it_computes else last + 1
    return tuple(op.output for op in ops[:end] if op.entry not in cached)


class _Line:
    """The tensors of one line by name, their sizes and their last uses."""

    def __init__(self, ops: Sequence[Op], input_bytes: int) -> None:
        self.ops = ops
        self.sizes = {INPUT: input_bytes}
        self.last_use: dict[str, int] = {}
        for i, op in enumerate(ops):
            self.sizes[op.output] = op.output_bytes
            for name in op.inputs:
                self.last_use[name] = i
            for name in op.holds:
                self.last_use[name] = i
        # What dies after each operation, unless somebody keeps it.
        self.dying: list[list[str]] = [[] for _ in ops]
        for i, op in enumerate(ops):
            self.dying[self.last_use.get(op.output, i)].append(op.output)

    def kept_by(self, end: int) -> frozenset[str]:
        """Tensors that the first `end` operations keep."""
        return frozenset(name for op in self.ops[:end] for name in op.keeps)

    def stores(self, cached: frozenset[str]) -> dict[str, int]:
        """Bytes that a policy stores, by operation: the output and whatever else the kernel gave with it."""
        if not cached:
            return {}
        return {op.output: op.output_bytes + op.hidden_bytes for op in self.ops if op.entry in cached}

    def forward(
        self,
        end: int,
        kept: frozenset[str],
        *,
        without_hidden: bool = False,
        stores: dict[str, int] | None = None,
        live: int | None = None,
    ) -> tuple[int, int]:
        """Bytes held after the first `end` operations, an output that nobody keeps left out, and the peak.

        `kept` stay. `stores` are made and stay, or with `live`, the bytes at the start, are there already.
        """
        ops, sizes, stores = self.ops, self.sizes, stores or {}
        again = live is not None
        live = sizes[INPUT] if live is None else live
        peak = live
        for i in range(end):
            op = ops[i]
            if op.output in stores:
                made = 0 if again else stores[op.output]
                peak = max(peak, live + made + (0 if again else op.forward_scratch_bytes))
            else:
                made = op.output_bytes + op.hidden_bytes
                highest = made + op.forward_scratch_bytes
                if without_hidden:
                    highest -= op.forward_only_less_bytes
                    made = op.output_bytes
                peak = max(peak, live + highest)
            live += made
            for name in self.dying[i]:
                if name not in kept and name != ops[-1].output and (again or name not in stores):
                    # What a policy stored is let go when the recomputation takes it up and nobody keeps it.
                    live -= sizes[name] if name not in stores else stores[name]
        held = live
        last = ops[-1].output
        if end == len(ops) and last not in kept:
            held -= sizes[last]
        if INPUT not in kept:
            held -= sizes[INPUT]
        return held, peak

    def recompute(self, stores: dict[str, int]) -> tuple[int, int]:
        """Peak of backward where the line runs again first, and the FLOPs of that."""
        ops = self.ops
        last = last_to_run_again(ops)
        end = last if ops[last].saves_before_it_computes else last + 1
        kept = self.kept_by(last + 1)
        at_start = self.sizes[INPUT] + sum(stores.values())
        _, peak = self.forward(end, kept | {INPUT}, stores=stores, live=at_start)
        gradient = ops[-1].output_bytes
        # Stored by the policy but never taken up again, since recomputation stopped before: freed with the line.
        unused = sum(stores[op.output] for op in ops[end:] if op.output in stores)
        held = unused + (self.sizes[INPUT] if INPUT not in kept else 0)
        saved = sum(self.sizes[name] for name in kept) + sum(op.hidden_bytes for op in ops)
        flops = sum(op.flops for op in ops[:end] if op.output not in stores)
        return max(peak + gradient, self.backward(saved) + held), flops

    def backward(self, held: int) -> int:
        """Peak of backward from `held` bytes and the gradient of the output."""
        ops, sizes = self.ops, self.sizes
        freed: list[int] = [op.hidden_bytes for op in ops]
        seen: set[str] = set()
        for i, op in enumerate(ops):
            for name in op.keeps:
                if name not in seen:
                    seen.add(name)
                    freed[i] += sizes[name]
        # Gradients alive, by tensor; a sum hands one storage to several names.
        storage_of: dict[str, int] = {ops[-1].output: 0}
        users = {0: 1}
        size_of = {0: ops[-1].output_bytes}
        made_storages = 1
        live = held + size_of[0]
        peak = live
        for i in range(len(ops) - 1, -1, -1):
            op = ops[i]
            own = storage_of.pop(op.output)
            arriving: list[tuple[str, int]] = []
            made = 0
            for name in op.inputs:
                if op.passes_gradient or op.backward_is_view:
                    arriving.append((name, own))
                    users[own] += 1
                else:
                    size_of[made_storages] = sizes[name]
                    users[made_storages] = 1
                    arriving.append((name, made_storages))
                    made += sizes[name]
                    made_storages += 1
            peak = max(peak, live + max(made + op.parameter_grad_bytes, op.backward_scratch_bytes))
            live += made + op.parameter_grad_bytes - freed[i]
            users[own] -= 1
            if not users[own]:
                live -= size_of[own]
            for name, storage in arriving:
                if name not in storage_of:
                    storage_of[name] = storage
                    continue
                # Both gradients and their sum are alive for a moment.
                other = storage_of[name]
                peak = max(peak, live + sizes[name])
                live += sizes[name]
                for old in (storage, other):
                    users[old] -= 1
                    if not users[old]:
                        live -= size_of[old]
                size_of[made_storages] = sizes[name]
                users[made_storages] = 1
                storage_of[name] = made_storages
                made_storages += 1
        return peak
