"""The chunked loss: the same loss and gradients as all logits at once, and never more than a slice of logits."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from tests.live_bytes import LiveBytes
from tests.small_run import log, losses, on_ranks, one_rank, small_spec, surroundings, train_here
from tests.specs import train_spec
from train.loop import _Attempt
from train.loss import batch_loss, chunked_cross_entropy, cross_entropy
from train.model import eval_mode
from train.parallel import build_sharded
from train.shapes import LOSS_CHUNKS
from train.spec import TrainSpec

CPU = torch.device("cpu")
D, V = 48, 1000
HEADS = {"tied": ("model.tie_embeddings=true",), "untied": ("model.tie_embeddings=false",)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


def parts(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (N, d), weight (V, d) and targets (N,), the same each time."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, D, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, D, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (tokens,), generator=generator)


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy((hidden @ weight.t())[None], targets[None])


# The same numbers.


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 64, 101, 512])
def test_loss_and_gradients_are_those_of_all_logits(tokens: int) -> None:
    hidden, weight, targets = parts(tokens)
    expected = full(hidden, weight, targets)
    expected_grads = torch.autograd.grad(expected * 0.25, (hidden, weight))
    found = chunked_cross_entropy(hidden, weight, targets)
    found_grads = torch.autograd.grad(found * 0.25, (hidden, weight))
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert found.dtype == torch.float32
    for mine, theirs in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, targets).item() == pytest.approx(expected.item(), abs=1e-6)


def test_logits_of_any_size_give_a_finite_loss() -> None:
    hidden, weight, targets = parts(16)
    far = hidden.detach() * 1e4
    assert chunked_cross_entropy(far, weight, targets).item() == pytest.approx(full(far, weight, targets).item())


def test_bf16_is_as_near_to_fp32_as_that_of_all_logits() -> None:
    hidden, weight, targets = parts(512, torch.bfloat16)
    exact = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    reference = torch.autograd.grad(full(*exact, targets), exact)
    whole = torch.autograd.grad(full(hidden, weight, targets), (hidden, weight))
    chunked = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), (hidden, weight))
    for ours, theirs, truth in zip(chunked, whole, reference, strict=True):
        assert ours.dtype == torch.bfloat16
        # The weight's gradient is rounded to bf16 after each slice, so its error may be larger, but no more than this.
        assert (ours.float() - truth).norm() < 3 * (theirs.float() - truth).norm() + 1e-6
    loss = chunked_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(full(hidden, weight, targets).item(), abs=1e-6)


def model_spec(*overrides: str) -> TrainSpec:
    return train_spec("model=tiny", "model.num_layers=2", "model.vocab_size=500", *overrides)


def step(spec: TrainSpec, loss: str) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, evaluated loss and gradients of two accumulated micro-batches of the real sharded module."""
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"loss": loss})})
    module = build_sharded(spec, CPU)
    torch.manual_seed(dist.get_rank())
    total = torch.zeros(())
    for _ in range(2):
        tokens = torch.randint(0, 500, (2, 33))
        value = batch_loss(spec.train, module, tokens[:, :-1], tokens[:, 1:]) / 2
        value.backward()
        total += value.detach()
    grads = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        grads[name] = parameter.grad.to_local()
    with eval_mode(module):
        evaluated = batch_loss(spec.train, module, tokens[:, :-1], tokens[:, 1:])
    return total.item(), evaluated.item(), grads


def difference(spec: TrainSpec) -> float:
    """The largest of any loss or gradient between the two losses."""
    (loss, evaluated, grads), (other_loss, other_evaluated, others) = step(spec, "full"), step(spec, "chunked")
    assert all(gradient.any() for name, gradient in others.items() if name != "positions.weight")  # 32 rows of 128
    worst = max(float((grads[name] - others[name]).abs().max()) for name in grads if grads[name].numel())
    return max(abs(loss - other_loss), abs(evaluated - other_evaluated), worst)


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
@pytest.mark.parametrize("head", HEADS)
def test_the_model_has_the_same_loss_and_gradients(head: str, reshard: str) -> None:
    assert difference(model_spec(*HEADS[head], f"parallel.reshard_after_forward={reshard}")) < 1e-6


def _difference_on_rank(specs: list[TrainSpec], file: str) -> None:
    dist.init_process_group("gloo")
    found = [difference(spec) for spec in specs]
    Path(f"{file}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_the_same_loss_and_gradients(tmp_path: Path) -> None:
    specs = [
        model_spec(*head, "parallel.devices_per_node=2", *more)
        for head in HEADS.values()
        for more in (
            (),
            ("parallel.reshard_after_forward=always",),
            ("parallel.reshard_after_forward=never",),
            ("ckpt=ops",),
            ("parallel.shard=none",),
        )
    ]
    assert on_ranks(2, tmp_path, _difference_on_rank, specs, str(tmp_path / "worst")) == [0, 0], log(tmp_path)
    for rank in range(2):
        assert max(json.loads((tmp_path / f"worst.{rank}").read_text(encoding="utf-8"))) < 1e-6


@pytest.mark.parametrize("overrides", [(), ("train.grad_accum=2", "model.tie_embeddings=false")], ids=str)
def test_training_loses_the_same(overrides: tuple[str, ...], tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, *overrides), tmp_path / "full")
    train_here(small_spec(tmp_path, *overrides, "train.loss=chunked"), tmp_path / "chunked")
    assert losses(tmp_path / "chunked") == pytest.approx(losses(tmp_path / "full"), abs=1e-6)


def test_a_held_out_loss_is_the_same(tmp_path: Path) -> None:
    reports = [
        train_here(small_spec(tmp_path, f"train.loss={loss}", "train.eval.sequences=7"), tmp_path / loss)
        for loss in ("full", "chunked")
    ]
    assert reports[0].final_eval_loss == pytest.approx(reports[1].final_eval_loss, abs=1e-6)


# The memory that the docstring of chunked_cross_entropy states.


def counted(hidden: Tensor, weight: Tensor, targets: Tensor) -> LiveBytes:
    live = LiveBytes()
    for tensor in (hidden, weight, targets):
        live.add(tensor)
    return live


@pytest.mark.parametrize("tokens", [3, 509, 512])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_worst_instant_of_a_slice_is_the_documented_one(precision: str, tokens: int) -> None:
    hidden, weight, targets = parts(tokens, DTYPES[precision])
    live = counted(hidden, weight, targets)
    before = live.total()
    gradients = hidden.nbytes + weight.nbytes
    rows = -(-tokens // LOSS_CHUNKS)
    slice_bytes = rows * V * (4 if precision == "fp32" else 4 + 2)
    vectors = 4 * rows * 4 + 4
    with live:
        live.start_phase()
        loss = chunked_cross_entropy(hidden, weight, targets)
    assert 0 <= live.peak - before - gradients - slice_bytes <= vectors
    assert live.total() - before - gradients <= 8  # the loss
    with live:
        live.start_phase()
        loss.backward()  # type: ignore[no-untyped-call]
    assert live.peak - before - gradients <= 16  # beside the loss and its gradient nothing is made
    del loss
    assert live.total() - before == gradients


@pytest.mark.parametrize("precision", DTYPES)
def test_during_the_products_one_slice_in_the_compute_dtype_is_alive(precision: str) -> None:
    hidden, weight, targets = parts(512, DTYPES[precision])
    live = counted(hidden, weight, targets)
    before = live.total()
    with live:
        live.start_phase()
        chunked_cross_entropy(hidden, weight, targets)
    products = [total for name, total in live.trail if name.startswith(("aten.mm.out", "aten.addmm_"))]
    assert len(products) == 2 * LOSS_CHUNKS
    one_slice = 64 * V * hidden.element_size()
    for total in products:
        assert 0 <= total - before - hidden.nbytes - weight.nbytes - one_slice <= 4 * 64 * 4 + 4


@pytest.mark.parametrize("precision", DTYPES)
def test_without_gradients_a_slice_is_all(precision: str) -> None:
    hidden, weight, targets = parts(512, DTYPES[precision])
    live = counted(hidden, weight, targets)
    before = live.total()
    with live, torch.no_grad():
        live.start_phase()
        chunked_cross_entropy(hidden, weight, targets)
    slice_bytes = 64 * V * (4 if precision == "fp32" else 4 + 2)
    assert 0 <= live.peak - before - slice_bytes <= 4 * 64 * 4 + 4


class _Largest(TorchDispatchMode):
    """Rows of the largest tensor (rows, V) that an operation gives; the head's weight, turned, is none."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result) if func is not torch.ops.aten.t.default else ():
            if torch.is_tensor(leaf) and leaf.dim() and leaf.shape[-1] == 500:
                self.rows = max(self.rows, leaf.numel() // 500)
        return result


@pytest.mark.parametrize(("loss", "rows"), [("full", 64), ("chunked", 64 // LOSS_CHUNKS)])
@pytest.mark.parametrize("head", HEADS)
def test_no_step_of_training_or_evaluation_makes_more_than_a_slice_of_logits(head: str, loss: str, rows: int) -> None:
    spec = model_spec(*HEADS[head], f"train.loss={loss}")
    module = build_sharded(spec, CPU)
    tokens = torch.randint(0, 500, (2, 32))
    largest = _Largest()
    with largest:
        value = batch_loss(spec.train, module, tokens, tokens)
        value.backward()  # type: ignore[no-untyped-call]
    assert largest.rows == rows
    largest.rows = 0
    with largest, eval_mode(module):
        batch_loss(spec.train, module, tokens, tokens)
    assert largest.rows == rows


# What it costs, and what it refuses.


def _product_flops(sum_shape, a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return mm_flop(a_shape, b_shape)


def test_nothing_runs_again_and_backward_has_no_product() -> None:
    hidden, weight, targets = parts(512)
    in_place = {torch.ops.aten.addmm_: _product_flops}  # upstream counts it as 0
    with FlopCounterMode(display=False, custom_mapping=in_place) as forward:
        loss = chunked_cross_entropy(hidden, weight, targets)
    with FlopCounterMode(display=False, custom_mapping=in_place) as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    assert forward.get_total_flops() == 3 * 2 * 512 * D * V
    assert backward.get_total_flops() == 0


def test_a_second_backward_is_refused() -> None:
    hidden, weight, targets = parts(16)
    loss = chunked_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"^train\.loss=chunked keeps its gradients for one backward pass"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_gradient_of_the_gradient_is_refused() -> None:
    hidden, weight, targets = parts(16)
    loss = chunked_cross_entropy(hidden, weight, targets)
    (grad,) = torch.autograd.grad(loss * loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


def test_the_loops_own_step_keeps_no_logits_alive(tmp_path: Path) -> None:
    overrides = ("model.vocab_size=8000", "train.micro_batch=8")
    peaks = {}
    for loss in ("full", "chunked"):
        spec = small_spec(tmp_path, *overrides, f"train.loss={loss}")
        attempt = _Attempt(spec, surroundings(spec, tmp_path / loss))
        attempt._step()
        live = LiveBytes()
        with live:
            live.start_phase()
            attempt._step()
        attempt.sequences.close()
        peaks[loss] = live.peak
    logits = 8 * 64 * 8000 * 4
    # All logits at once: they, their log-softmax and its gradient are alive together; chunked: an eighth of one.
    assert peaks["full"] > 2 * logits
    assert peaks["full"] - peaks["chunked"] > 1.5 * logits
