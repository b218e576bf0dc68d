"""The ledger of saved tensors: what autograd holds between forward and backward, tensor by tensor.

Takes a TrainSpec, gives Sections of Entries. A policy is a choice of entries: those that stay and those that are made
again. tests/test_saved_tensors.py holds it against the storages that are really alive, byte for byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.memory.block import FP32, Setting, block_ops, last_norm_ops, setting
from orchestrator.memory.graph import INPUT, Op
from orchestrator.memory.sizes import RNG_STATE_BYTES, cached_entries, inputs
from train import shapes
from train.spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One storage that lives from forward to backward."""

    name: str
    op: str
    """The operation that makes it, as torch calls it."""
    dims: tuple[int, ...]
    dtype: str
    size_bytes: int
    """As allocated: on CUDA a multiple of 512."""
    recompute_flops: int
    """FLOPs of the operation that makes it."""
    kept_for: tuple[str, ...]
    """The operations that share this storage for their backward; empty: a policy keeps it for the recomputation."""
    policy_name: str
    """The name by which ckpt.save keeps it; empty: it has none."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Entries of one part of the model."""

    name: str
    copies: int
    """How often the model has this part."""
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """Of one copy."""
        return sum(entry.size_bytes for entry in self.entries)


def ledger(spec: TrainSpec) -> tuple[Section, ...]:
    """All that is held at the end of forward, section by section, under the spec's policy; `device` is resolved."""
    here = setting(spec)
    ops = block_ops(here)
    layers = spec.model.num_layers
    again = len(spec.ckpt.layers_recomputed(layers))
    sections = [
        Section(name="inputs", copies=1, entries=_inputs(here)),
        Section(name="block", copies=layers - again, entries=kept_entries(here, ops)),
        Section(name="recomputed block", copies=again, entries=stored_entries(here, ops, cached_entries(spec))),
        Section(name="last norm", copies=1, entries=kept_entries(here, last_norm_ops(here))),
        Section(name="head and loss", copies=1, entries=_loss(here)),
    ]
    return tuple(section for section in sections if section.copies)


def kept_entries(here: Setting, ops: Sequence[Op]) -> tuple[Entry, ...]:
    """What a line of operations keeps where nothing is recomputed, in the order of their making."""
    kept_for: dict[str, list[str]] = {}
    for op in ops:
        for name in op.keeps:
            kept_for.setdefault(name, []).append(op.output)
    entries = [_input(here, kept_for[INPUT])] if INPUT in kept_for else []
    for op in ops:
        entries += _hidden(op)
        if op.output in kept_for:
            entries.append(_output(op, tuple(kept_for[op.output])))
    return tuple(entries)


def stored_entries(here: Setting, ops: Sequence[Op], cached: frozenset[str]) -> tuple[Entry, ...]:
    """What a line that recomputes keeps: its input, the state of the random numbers, and what the policy names."""
    entries = [_input(here, [])]
    if not here.on_cuda:
        entries.append(_entry("rng_state", "get_rng_state", (RNG_STATE_BYTES,), "uint8", RNG_STATE_BYTES))
    for op in ops:
        if op.entry in cached:
            entries += [*_hidden(op), _output(op, ())]
    return tuple(entries)


def _entry(name: str, op: str, dims: tuple[int, ...], dtype: str, size_bytes: int, *kept_for: str) -> Entry:
    return Entry(
        name=name,
        op=op,
        dims=dims,
        dtype=dtype,
        size_bytes=size_bytes,
        recompute_flops=0,
        kept_for=kept_for,
        policy_name="",
    )


def _input(here: Setting, kept_for: list[str]) -> Entry:
    loop, model = here.spec.train, here.spec.model
    dims = (loop.micro_batch, loop.seq_len, model.d_model)
    return _entry(INPUT, "the part before", dims, here.dtype, here.hidden_bytes, *kept_for)


def _output(op: Op, kept_for: tuple[str, ...]) -> Entry:
    return Entry(
        name=op.output,
        op=op.kind,
        dims=op.dims,
        dtype=op.dtype,
        size_bytes=op.output_bytes,
        recompute_flops=op.flops,
        kept_for=kept_for,
        policy_name=op.entry,
    )


def _hidden(op: Op) -> list[Entry]:
    return [_entry(s.name, op.kind, s.dims, s.dtype, s.size_bytes, op.output) for s in op.hidden]


def _inputs(here: Setting) -> tuple[Entry, ...]:
    return tuple(
        _entry(name, "data" if name in ("tokens", "targets") else "embedding", dims, dtype, size, "embedding")
        for name, dims, dtype, size in inputs(here)
    )


def _loss(here: Setting) -> tuple[Entry, ...]:
    """Full: the head's input and the log-probabilities. Chunked: the gradients, which are there already."""
    model, tokens, size = here.spec.model, here.tokens, here.size
    hidden = here.hidden_bytes
    rows, matrix = (tokens, model.d_model), (model.vocab_size, model.d_model)
    if here.spec.train.loss == "chunked":
        matrix_bytes = size(model.vocab_size * model.d_model * here.width)
        return (
            _entry("hidden.grad", "chunked_cross_entropy", rows, here.dtype, hidden, "loss"),
            _entry("head.weight.grad", "chunked_cross_entropy", matrix, here.dtype, matrix_bytes, "loss"),
        )
    numbers = tokens * model.vocab_size
    flops = shapes.head_forward_flops(model, here.spec.train.micro_batch, here.spec.train.seq_len)
    log_probs = _entry("log_probs", "log_softmax", (tokens, model.vocab_size), "fp32", size(numbers * FP32), "loss")
    return (
        _entry("norm", "norm", rows, here.dtype, hidden, "head"),
        Entry(**(vars(log_probs) | {"recompute_flops": flops})),
    )
