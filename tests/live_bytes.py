"""Counts the bytes of tensors that are really alive: the measure that formulas are held against.

A dispatch mode that sees every storage an operation makes, and takes each one's size at the time it is asked:
FSDP frees parameters by resizing their storages to nothing, which no operation shows.
"""

import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.checkpoint import Progress, load, save
from train.loss import batch_loss
from train.model import Transformer
from train.optim import build_optimizer, clip_gradients
from train.parallel import build_sharded
from train.spec import TrainSpec


class LiveBytes(TorchDispatchMode):
    """Live bytes after each operation, and their peak since `start_phase`."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = 0
        self.peak = 0
        self.peak_op = ""
        self.trail: list[tuple[str, int]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Count this tensor's storage, once, while it lives."""
        local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self._storages.pop, key, None)

    def start_phase(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now = self.total()
        self.trail = []

    def total(self) -> int:
        """Bytes alive at this moment."""
        return sum(self.sizes())

    def sizes(self, without: Iterable[torch.Tensor] = ()) -> list[int]:
        """Bytes of each storage alive at this moment, those of the tensors `without` left out."""
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        alive = [(key, ref()) for key, ref in list(self._storages.items())]
        return [storage.nbytes() for key, storage in alive if storage is not None and key not in left_out]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(t, "__name__", "") == "DTensor" for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not isinstance(leaf, FakeTensor):
                self.add(leaf)
        self.now = self.total()
        self.trail.append((str(func), self.now))
        if self.now > self.peak:
            self.peak, self.peak_op = self.now, str(func)
        return out


_PHASE = "phase of a step: "


class AllocatorBytes:
    """Peaks of bytes allocated while it is entered, phase by phase, by the CPU allocator's own events.

    Unlike LiveBytes it changes nothing: under a dispatch mode autograd adds gradients out of place that it else adds in
    place, as it takes every tensor for one of a subclass.
    """

    def __init__(self, start_bytes: int) -> None:
        self._start_bytes = start_bytes
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.peaks: dict[str, int] = {}

    def start_phase(self, name: str) -> None:
        """What follows, until the next call, is this phase."""
        with record_function(f"{_PHASE}{name}"):
            pass

    def __enter__(self) -> "AllocatorBytes":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        time.sleep(0.01)  # gloo may free late
        self._profile.__exit__(*error)
        now, phase = self._start_bytes, ""
        events = list(self._profile.profiler.kineto_results.events())
        for _, _, event in sorted((event.start_ns(), i, event) for i, event in enumerate(events)):
            if event.name().startswith(_PHASE):
                phase = event.name().removeprefix(_PHASE)
                self.peaks[phase] = now
            elif event.name() == "[memory]":
                now += event.nbytes()
                self.peaks[phase] = max(self.peaks.get(phase, 0), now)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the local storages of these tensors, each once."""
    local = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in local}.values())


def step_peaks(spec: TrainSpec) -> dict[str, int]:
    """Peaks of bytes alive in an optimizer step of the real trainer's parts, by phase; needs a process group.

    The step is the loop's own (train/loop.py), taken apart at the ends of its phases. Not the first, in which AdamW has
    no states; with several ranks the least of four, as what a thread of gloo's frees is not always among the events.
    """
    gc.collect()
    gc.disable()  # else what an earlier test left is freed, and counted, in between
    try:
        return _step_peaks(spec)
    finally:
        gc.enable()


def _step_peaks(spec: TrainSpec) -> dict[str, int]:
    module = build_sharded(spec, torch.device("cpu"))
    init = storage_bytes(module.parameters())
    optimizer = build_optimizer(module, spec.optim)
    steps = []
    for _ in range(2 if spec.parallel.world_size == 1 else 5):
        peaks = {"init": init, "forward": 0, "backward": 0}
        for _ in range(spec.train.grad_accum):
            inputs = torch.randint(0, spec.model.vocab_size, (spec.train.micro_batch, spec.train.seq_len))
            targets = inputs.clone()
            with AllocatorBytes(storage_bytes(_held_between_passes(module, optimizer, inputs, targets))) as live:
                live.start_phase("forward")
                loss = batch_loss(spec.train, module, inputs, targets) / spec.train.grad_accum
                live.start_phase("backward")
                loss.backward()
            peaks |= {phase: max(peaks[phase], peak) for phase, peak in live.peaks.items() if phase}
            del loss
        with AllocatorBytes(storage_bytes(_held_between_passes(module, optimizer, inputs, targets))) as live:
            live.start_phase("optimizer_step")
            if spec.optim.clip_norm is not None:
                clip_gradients(module.parameters(), spec.optim.clip_norm)
            optimizer.step()
        peaks["optimizer_step"] = live.peaks["optimizer_step"]
        optimizer.zero_grad(set_to_none=True)
        steps.append(peaks)
    return {phase: min(step[phase] for step in steps[1:]) for phase in peaks}


def _held_between_passes(
    module: Transformer, optimizer: torch.optim.Optimizer, *batch: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Shards, their gradients, optimizer states, the batch and what the module keeps for itself."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for state in optimizer.state.values():
        yield from state.values()
    yield from batch
    if module._rope is not None:
        yield module._rope


def resume_peak(spec: TrainSpec, folder: Path) -> int:
    """Peak of live bytes while a checkpoint is loaded into a module and an optimizer that have just been built."""
    progress = Progress(
        step=1, sequences=1, tokens=1, wall_time_s=0.0, device_hours=0.0, step_time_s=0.0, data_fingerprint=""
    )
    module = build_sharded(spec, torch.device("cpu"))
    saved = save(folder, progress, module, build_optimizer(module, spec.optim), keep=1)
    live = LiveBytes()
    again = build_sharded(spec, torch.device("cpu"))
    for parameter in again.parameters():
        live.add(parameter)
    optimizer = build_optimizer(again, spec.optim)
    with live:
        live.start_phase()
        load(saved, again, optimizer)
    return live.peak
