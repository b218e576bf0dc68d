"""What this machine has, and what `auto` becomes on it."""

from types import SimpleNamespace

import psutil
import pytest

from orchestrator import device
from orchestrator.errors import NotSubmittedError
from tests.specs import train_spec

GIB = 1024**3


def fake_nvml(monkeypatch: pytest.MonkeyPatch, *products: str) -> None:
    """A machine with these cards of 80, 79, ... GiB, all in use."""

    class NVMLError(Exception):
        pass

    def init() -> None:
        if not products:
            raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(products),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetName=lambda index: products[index],
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(free=1, total=(80 - index) * GIB),
        nvmlDeviceGetCudaComputeCapability=lambda index: (7, 5),
    )
    monkeypatch.setattr(device, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    found = device.resolve(train_spec("device=auto")).device
    assert (found.name, found.kind) == ("cpu", "cpu")
    assert 0 < (found.usable_bytes or 0) <= psutil.virtual_memory().total


def test_ranks_share_the_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_memory_bytes", lambda: 8 * GIB)
    assert device.resolve(train_spec("device=cpu", "parallel.devices_per_node=2")).device.usable_bytes == 4 * GIB


def test_usable_bytes_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_memory_bytes", lambda: 8 * GIB)
    assert device.resolve(train_spec("device=cpu", "device.usable_bytes=7")).device.usable_bytes == 7


def test_auto_is_the_card_that_is_there_with_its_files_numbers_also_while_it_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, "NVIDIA A100-SXM4-40GB")
    assert device.resolve(train_spec("device=auto")).device == train_spec("device=a100_40gb").device


def test_auto_is_the_smallest_of_several_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, "NVIDIA H200", "Tesla T4")
    found = device.resolve(train_spec("device=auto")).device
    assert (found.name, found.usable_bytes, found.compute_capability) == ("tesla_t4", 79 * GIB, 7.5)
    assert "NVML" in found.sources["usable_bytes"]


@pytest.mark.parametrize("product", ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA H200", "NVIDIA GeForce RTX 4090 D"])
def test_a_card_without_a_file_has_only_what_nvml_reads(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, product)
    found = device.resolve(train_spec("device=auto")).device
    assert (found.kind, found.usable_bytes) == ("cuda", 80 * GIB)
    assert found.context_bytes is None
    assert found.peak_flops_bf16 is None


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ("GPU-0", "GPU-1", "GPU-2")),
        ("2,0", ("GPU-2", "GPU-0")),
        ("GPU-1", ("GPU-1",)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("GPU-0",)),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    variable: str | None, visible: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(monkeypatch, "a", "b", "c")
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert device.visible_gpus() == visible


def test_a_run_for_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    with pytest.raises(NotSubmittedError, match=r"device=a100_40gb: this machine shows no GPU. Set device=cpu"):
        device.check_present(train_spec("device=a100_40gb"))


def test_more_ranks_than_gpus_are_refused_with_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, "a", "b")
    with pytest.raises(NotSubmittedError, match=r"parallel.devices_per_node=8: this machine shows 2 GPUs"):
        device.check_present(train_spec("device=a100_40gb", "parallel=node_8"))


def test_memory_available_is_never_more_than_the_kernel_says() -> None:
    assert 0 < device.available_memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("needs", "context_bytes"),
    [
        (["filelock", "cuda-toolkit[cublas]==13.0.3"], 600834048),
        (["nvidia-cuda-nvrtc-cu12==12.8.93"], 600834048),
        (["filelock", "sympy"], 294744064),
        (None, 294744064),
    ],
)
def test_what_torch_takes_by_itself_on_a_cpu_goes_by_its_build(
    needs: list[str] | None, context_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.metadata, "requires", lambda name: needs)
    found = device.resolve(train_spec("device=cpu")).device
    assert found.context_bytes == context_bytes
    assert device.resolve(train_spec("device=cpu", "device.context_bytes=5")).device.context_bytes == 5


def test_a_run_planned_for_a_larger_card_than_is_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(device, "torch_is_built_for_cuda", lambda: True)
    spec = train_spec("device=h100_80gb", f"device.usable_bytes={81 * GIB}")
    with pytest.raises(NotSubmittedError, match=rf"usable bytes, and a GPU of this machine has {80 * GIB}"):
        device.check_present(spec)
    device.check_present(train_spec("device=a100_40gb"))


def test_a_gpu_run_with_a_torch_for_cpu_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(device, "torch_is_built_for_cuda", lambda: False)
    with pytest.raises(NotSubmittedError, match="built for CPU alone"):
        device.check_present(train_spec("device=a100_40gb"))


def test_what_is_set_of_device_auto_stays_as_set() -> None:
    seen = device.resolve(train_spec("device.usable_bytes=700000000", "device.context_bytes=1")).device
    assert (seen.usable_bytes, seen.context_bytes) == (700000000, 1)
    assert seen.workspace_bytes
