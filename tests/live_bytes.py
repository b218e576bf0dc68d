"""Counts the bytes of tensors that are really alive: the measure that formulas are held against.

A dispatch mode that sees every storage an operation makes, and takes each one's size at the time it is asked:
FSDP frees parameters by resizing their storages to nothing, which no operation shows.
"""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        alive = [ref() for ref in list(self._storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)

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
