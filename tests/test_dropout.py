"""Residual dropout: where it is, that a resume draws the same, and that without it nothing changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.small_run import log, losses, one_rank, small_spec, train_here, train_ranks
from tests.specs import train_spec
from tests.test_shapes import CPU_FLASH
from train import shapes
from train.loop import _dropout_seed
from train.loss import cross_entropy
from train.model import Transformer, eval_mode

B, T, LAYERS = 2, 16, 3
TOKENS = torch.arange(B * T).view(B, T)
MODEL = train_spec("model=tiny", f"model.num_layers={LAYERS}").model


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


class _Names(TorchDispatchMode):
    """Names of the operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(module: Transformer) -> list[str]:
    with _Names() as run:
        module(TOKENS)
    return run.names


def test_two_outputs_of_a_block_and_the_embedding_are_dropped() -> None:
    module = Transformer(MODEL, dropout=0.5)
    calls: list[str] = []
    inputs: dict[str, torch.Tensor] = {}
    for name, submodule in module.named_modules():
        submodule.register_forward_hook(lambda m, args, out, name=name: calls.append(name))
        submodule.register_forward_pre_hook(lambda m, args, name=name: inputs.__setitem__(name, args[0]))
    names = operations(module)
    assert sum("bernoulli" in name for name in names) == 1 + 2 * LAYERS
    assert calls.count("blocks.0") == 1
    # The embedding: about half of it is zero where the first block takes it.
    share = (inputs["blocks.0"] == 0).float().mean().item()
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_what_a_block_adds_is_dropped_and_scaled(part: str) -> None:
    module = Transformer(MODEL, dropout=0.25)
    block = module.blocks[0]
    other = block.mlp if part == "attention" else block.attention
    last = other.down if part == "attention" else other.o
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    x = torch.randn(8, T, MODEL.d_model)
    with torch.no_grad():
        dropped = block(x, None) - x
        block.dropout = 0.0
        whole = block(x, None) - x
    gone = dropped.abs() < 1e-7
    assert gone.float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.allclose(dropped[~gone], whole[~gone] / 0.75, atol=1e-5)


def test_evaluation_drops_nothing() -> None:
    torch.manual_seed(0)
    dropped = Transformer(MODEL, dropout=0.5)
    plain = Transformer(MODEL)
    plain.load_state_dict(dropped.state_dict())
    with eval_mode(dropped):
        assert torch.equal(dropped(TOKENS), plain(TOKENS))
    assert not torch.equal(dropped(TOKENS), plain(TOKENS))


def test_without_dropout_no_operation_is_added() -> None:
    plain, zero, half = (operations(Transformer(MODEL, dropout=share)) for share in (0.0, 0.0, 0.5))
    assert plain == zero
    assert not any("bernoulli" in name or "dropout" in name for name in plain)
    assert len(half) > len(plain)


def test_dropout_has_no_parameters_and_no_flops() -> None:
    module = Transformer(MODEL, dropout=0.5)
    assert [n for n, _ in module.named_parameters()] == [s.name for s in shapes.parameters(MODEL)]
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as counted:
        cross_entropy(module(TOKENS), TOKENS)
    expected = LAYERS * shapes.block_forward_flops(MODEL, B, T) + shapes.head_forward_flops(MODEL, B, T)
    assert counted.get_total_flops() == expected


def test_a_run_without_dropout_draws_nothing(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    train_here(small_spec(tmp_path), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_run_with_dropout_learns_and_another_seed_drops_others(tmp_path: Path) -> None:
    dropped = ("train.dropout=0.2", "budget.max_steps=12")
    train_here(small_spec(tmp_path, *dropped), tmp_path / "one")
    train_here(small_spec(tmp_path, *dropped), tmp_path / "again")
    train_here(small_spec(tmp_path, "budget.max_steps=12"), tmp_path / "plain")
    assert losses(tmp_path / "one") == losses(tmp_path / "again")
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0] - 0.1
    assert losses(tmp_path / "one")[1:] != losses(tmp_path / "plain")[1:]


def test_a_resume_drops_what_the_run_would_have_dropped(tmp_path: Path) -> None:
    overrides = ("train.dropout=0.3", "optim.schedule=constant", "ckpt=ops", "train.grad_accum=2")
    train_here(small_spec(tmp_path, *overrides, "budget.max_steps=6"), tmp_path / "whole")
    train_here(small_spec(tmp_path, *overrides, "budget.max_steps=3"), tmp_path / "resumed")
    torch.manual_seed(99)
    train_here(small_spec(tmp_path, *overrides, "budget.max_steps=6"), tmp_path / "resumed", attempt=2)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")


def test_seed_step_and_rank_each_change_what_is_dropped() -> None:
    seeds = {_dropout_seed(*key) for key in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (1, 2, 1)]}
    assert len(seeds) == 5


@pytest.mark.slow
def test_two_ranks_with_dropout_and_every_saving_lose_what_the_plain_ones_lose(tmp_path: Path) -> None:
    overrides = ("parallel.devices_per_node=2", "train.dropout=0.2")
    saving = ("ckpt=ops", "train.loss=chunked")
    assert train_ranks(small_spec(tmp_path, *overrides), tmp_path / "plain") == [0, 0], log(tmp_path / "plain")
    assert train_ranks(small_spec(tmp_path, *overrides, *saving), tmp_path / "saving") == [0, 0]
    assert losses(tmp_path / "saving") == pytest.approx(losses(tmp_path / "plain"), abs=1e-6)
