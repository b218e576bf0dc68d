"""What one rank's memory was: the CUDA allocator's peaks, or the growth of the resident set on CPU.

Takes nothing, gives bytes. Sources: torch.cuda.memory_stats; proc(5) for VmHWM and clear_refs.
"""

import ctypes
import os
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


_M_MMAP_THRESHOLD = -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 65536


def return_freed_memory() -> None:
    """Have malloc return a tensor's memory when it is freed, so that the resident set is the tensors alive.

    glibc else keeps what it freed, up to twice the tensors of a small model, and no formula can tell how much; the
    price is a tenth to a quarter of the speed on CPU (tests/bench/cpu_resident.py shows both). MALLOC_MMAP_THRESHOLD_
    in the environment wins; elsewhere than on glibc nothing happens.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


class MemoryMeter:
    """Peaks since its construction, which comes before the model is built."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rss_baseline_bytes: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _reset_high_water_mark():
            self.rss_baseline_bytes = _status_bytes("VmRSS")

    def peak_allocated_bytes(self) -> int | None:
        """Peak of the CUDA allocator; None on cpu."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def peak_reserved_bytes(self) -> int | None:
        """Peak of what the CUDA allocator took from the device; None on cpu."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None

    def rss_growth_bytes(self) -> int | None:
        """Peak resident set above the baseline; None on cuda, or where the kernel does not tell."""
        peak = None if self.rss_baseline_bytes is None else _status_bytes("VmHWM")
        return None if peak is None or self.rss_baseline_bytes is None else peak - self.rss_baseline_bytes

    def peak_device_bytes(self) -> int | None:
        """On cpu the peak resident set; on cuda the peak reserved and what the device holds besides.

        The latter counts other processes on the device too.
        """
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            besides = total - free - torch.cuda.memory_reserved(self.device)
            return torch.cuda.max_memory_reserved(self.device) + besides
        growth = self.rss_growth_bytes()
        return None if growth is None or self.rss_baseline_bytes is None else self.rss_baseline_bytes + growth


def _reset_high_water_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
