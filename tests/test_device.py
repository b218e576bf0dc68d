"""What this machine has, and what `auto` becomes on it."""

from types import SimpleNamespace

import psutil
import pytest

from orchestrator import device
from orchestrator.errors import NotSubmittedError
from tests.specs import train_spec

GIB = 1024**3


def fake_nvml(monkeypatch: pytest.MonkeyPatch, *products: str) -> None:
    """A machine with these cards, each with 10 GiB free."""

    class NVMLError(Exception):
        pass

    def init() -> None:
        if not products:
            raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(products),
        nvmlDeviceGetHandleByIndex=lambda index: products[index],
        nvmlDeviceGetHandleByUUID=lambda uuid: products[int(uuid.removeprefix("GPU-"))],
        nvmlDeviceGetName=lambda handle: handle,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=10 * GIB),
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


def test_auto_is_the_card_that_is_there_with_its_files_numbers_and_its_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, "NVIDIA A100-SXM4-40GB")
    found = device.resolve(train_spec("device=auto")).device
    assert (found.name, found.kind, found.usable_bytes) == ("a100_40gb", "cuda", 10 * GIB)
    assert found.context_bytes == train_spec("device=a100_40gb").device.context_bytes
    assert "NVML" in found.sources["usable_bytes"]


@pytest.mark.parametrize("product", ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA H200", "NVIDIA GeForce RTX 4090 D"])
def test_a_card_without_a_file_has_only_its_free_memory(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, product)
    found = device.resolve(train_spec("device=auto")).device
    assert (found.kind, found.usable_bytes) == ("cuda", 10 * GIB)
    assert found.context_bytes is None
    assert found.peak_flops_bf16 is None


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        ("GPU-1", ("GPU-1",)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("0",)),
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
