"""Counts the bytes of tensors that are really alive: the measure that formulas are held against.

A dispatch mode that sees every storage an operation makes, and takes each one's size at the time it is asked:
FSDP frees parameters by resizing their storages to nothing, which no operation shows.
"""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.checkpoint import Progress, load, save
from train.loss import batch_loss
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


def step_peaks(spec: TrainSpec) -> dict[str, int]:
    """Peaks of live bytes in the second optimizer step of the real trainer's parts, by phase; needs a process group.

    The step is the loop's own (train/loop.py), taken apart at the ends of its phases.
    """
    live = LiveBytes()
    module = build_sharded(spec, torch.device("cpu"))
    for parameter in module.parameters():
        live.add(parameter)
    peaks = {"init": live.total()}
    optimizer = build_optimizer(module, spec.optim)
    size = (spec.train.micro_batch, spec.train.seq_len)
    for _ in range(2):
        peaks |= {"forward": 0, "backward": 0}
        for _ in range(spec.train.grad_accum):
            inputs = torch.randint(0, spec.model.vocab_size, size)
            targets = inputs.clone()
            live.add(inputs)
            live.add(targets)
            with live:
                live.start_phase()
                loss = batch_loss(spec.train, module, inputs, targets) / spec.train.grad_accum
                peaks["forward"] = max(peaks["forward"], live.peak)
                live.start_phase()
                loss.backward()
                peaks["backward"] = max(peaks["backward"], live.peak)
                del loss
        with live:
            live.start_phase()
            if spec.optim.clip_norm is not None:
                clip_gradients(module.parameters(), spec.optim.clip_norm)
            optimizer.step()
            peaks["optimizer_step"] = live.peak
            optimizer.zero_grad(set_to_none=True)
    return peaks


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
