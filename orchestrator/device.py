"""What this machine has: its GPUs by NVML, its CPU memory with the cgroup's limit.

Takes a DeviceSpec as configured, gives the concrete one that the estimate reads. It must not import torch.
"""

import os
import re
from importlib import metadata
from pathlib import Path

import psutil
import pynvml
import yaml

from orchestrator.errors import NotSubmittedError
from orchestrator.project import CONF_DIR
from train.spec import DeviceSpec, TrainSpec

# A rank's resident set before the model is built, and its growth beside the tensors, by the build of torch. 573 and 138
# MiB with 2.14.1 for CUDA: the median of 54 runs (tests/bench/cpu_truth.py), of which 109 MiB are modules and libraries
# that torch loads when a model is first sharded, the rest kernels' code pages and packed matrices; single runs have 124
# to 152. 281 and 72 MiB with 2.13.0 for CPU alone (tests/bench/cpu_resident.py).
_CUDA_BUILD_BYTES = (600834048, 144703488)
_CPU_BUILD_BYTES = (294744064, 75497472)
_NUMBERS = tuple(name for name in DeviceSpec.model_fields if name.endswith(("_bytes", "_capability", "_fp32", "_bf16")))
# NVML's product names and the device files that speak of them.
_KNOWN_CARDS = (
    (r"A100.*40GB", "a100_40gb"),
    (r"A100.*80GB", "a100_80gb"),
    (r"H100 80GB", "h100_80gb"),
    (r"H100.*96GB", "h100_96gb"),
    (r"V100.*16GB", "v100_16gb"),
    (r"RTX 3090(?! Ti)", "rtx_3090"),
    (r"RTX 4090(?! D)", "rtx_4090"),
)


def visible_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that this process may use, in CUDA_VISIBLE_DEVICES' order; empty without GPUs.

    UUIDs, because a number means another card to CUDA (fastest first) than to NVML (by bus), and because a lease must
    be on the card whatever it is called.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(_uuid(i) for i in range(count))
    found: list[str] = []
    for name in (word.strip() for word in named.split(",")):
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= count):
            break  # as CUDA does: what comes after a device that does not exist is not visible
        found.append(_uuid(int(name)) if name.isdigit() else name)
    return tuple(found)


def _uuid(index: int) -> str:
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))


def resolve(spec: TrainSpec) -> TrainSpec:
    """The spec with the device it will really see: auto becomes a card or cpu, and free memory is read.

    What the user set of device=auto stays as set. On cpu, usable_bytes is one rank's even share of what the machine has
    available.
    """
    device = spec.device
    if device.kind == "auto":
        found = _gpu_here(device) if visible_gpus() else _read(CONF_DIR / "device" / "cpu.yaml")
        device = found.model_copy(update={name: getattr(device, name) for name in _NUMBERS if _is_set(device, name)})
    if device.kind == "cpu":
        device = _cpu_here(device, spec.parallel.devices_per_node)
    return spec.model_copy(update={"device": device})


def _is_set(device: DeviceSpec, name: str) -> bool:
    return getattr(device, name) is not None


def _cpu_here(device: DeviceSpec, ranks: int) -> DeviceSpec:
    """What is null of a cpu: a rank's share of the memory, and what torch takes by itself."""
    context, workspace = _CUDA_BUILD_BYTES if torch_is_built_for_cuda() else _CPU_BUILD_BYTES
    known = {
        "usable_bytes": available_memory_bytes() // ranks,
        "context_bytes": context,
        "workspace_bytes": workspace,
    }
    return device.model_copy(update={k: v for k, v in known.items() if getattr(device, k) is None})


def torch_is_built_for_cuda() -> bool:
    """Whether the torch that is installed brings CUDA's libraries, from its metadata; True where none is installed."""
    try:
        needs = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return True
    return any(name.startswith(("nvidia-", "cuda-")) for name in needs)


def check_present(spec: TrainSpec) -> None:
    """Raise NotSubmittedError where this machine lacks the devices that a local run needs."""
    if spec.device.kind != "cuda":
        return
    gpus = visible_gpus()
    here = len(gpus)
    if here == 0:
        raise NotSubmittedError(
            f"device={spec.device.name}: this machine shows no GPU. Set device=cpu or device=auto, "
            "or run only the pre-flight: python -m orchestrator check"
        )
    if here < spec.parallel.devices_per_node:
        raise NotSubmittedError(
            f"parallel.devices_per_node={spec.parallel.devices_per_node}: this machine shows {here} GPUs. "
            f"Set it to at most {here}."
        )
    if not torch_is_built_for_cuda():
        raise NotSubmittedError(
            f"device={spec.device.name}: the torch that is installed is built for CPU alone. Install one for CUDA, "
            "or set device=cpu"
        )
    total, usable = min(_total_bytes(gpu) for gpu in gpus), spec.device.usable_bytes
    if usable is not None and usable > total:
        raise NotSubmittedError(
            f"device={spec.device.name}: the plan is for {usable} usable bytes, and a GPU of this machine has {total}. "
            "Set device=auto, or device.usable_bytes to what is there."
        )


def available_memory_bytes() -> int:
    """Memory that new processes can get: MemAvailable, or what the cgroup still allows where that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file, stat_file, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        root = Path("/sys/fs/cgroup")
        limit, used = _int_file(root / limit_file), _int_file(root / used_file)
        if limit is not None and used is not None:
            reclaimable = _stat(root / stat_file, cache_key)
            available = min(available, max(0, limit - used + reclaimable))
    return available


def _int_file(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max": no limit
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def _read(path: Path) -> DeviceSpec:
    return DeviceSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def _handle(gpu: str) -> object:
    return pynvml.nvmlDeviceGetHandleByUUID(gpu)


def _total_bytes(gpu: str) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(_handle(gpu)).total)


def _gpu_here(auto: DeviceSpec) -> DeviceSpec:
    """The smallest of the visible GPUs: its file's numbers where it is known, else what NVML reads.

    All of its memory, not what is free at this moment: a run waits in the queue until the others are gone.
    """
    gpu = min(visible_gpus(), key=_total_bytes)
    product = str(pynvml.nvmlDeviceGetName(_handle(gpu)))
    file = next((file for pattern, file in _KNOWN_CARDS if re.search(pattern, product)), None)
    if file is not None:
        return _read(CONF_DIR / "device" / f"{file}.yaml")
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(_handle(gpu))
    return auto.model_copy(
        update={
            "name": re.sub(r"[^a-z0-9]+", "_", product.lower()).strip("_"),
            "kind": "cuda",
            "usable_bytes": _total_bytes(gpu),
            "compute_capability": float(f"{major}.{minor}"),
            "sources": auto.sources | {"usable_bytes": f"total memory of {gpu} as NVML reads it"},
        }
    )
