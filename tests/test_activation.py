"""Activation checkpointing: the same training, the same names, and as much recomputed as the policy says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.small_run import losses, one_rank, small_spec, train_here
from tests.specs import train_spec
from train import shapes
from train.activation import apply_checkpointing
from train.loop import cross_entropy
from train.model import Transformer, build
from train.spec import TrainSpec

POLICIES = {
    "none": ("ckpt=none",),
    "full": ("ckpt=full",),
    "every second": ("ckpt=selective", "ckpt.every=2"),
    "these": ("ckpt=selective", "ckpt.layers=[0,3]"),
    "the first three": ("ckpt=selective", "ckpt.first=3"),
    "the first none": ("ckpt=selective", "ckpt.first=0"),
}
RECOMPUTED = {
    "none": (),
    "full": (0, 1, 2, 3),
    "every second": (1, 3),
    "these": (0, 3),
    "the first three": (0, 1, 2),
    "the first none": (),
}
FAMILIES = {
    "gelu": (),
    "swiglu": ("model.mlp=swiglu", "model.norm=rmsnorm", "model.position=rope", "model.rope_theta=10000.0"),
}
B, T = 2, 32


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("unchanged")
    train_here(small_spec(folder, "model.num_layers=4"), folder / "run")
    return losses(folder / "run")


def spec(policy: str, *overrides: str) -> TrainSpec:
    return train_spec("model=tiny", "model.attention=math", *POLICIES[policy], *overrides)


def module_of(spec: TrainSpec) -> Transformer:
    """Checkpointed and filled with the same numbers each time."""
    module = build(spec.model)
    apply_checkpointing(module, spec.ckpt)
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    return module


def loss_of(module: Transformer) -> Tensor:
    tokens = torch.arange(B * T).view(B, T) % 256
    return cross_entropy(module(tokens), tokens.roll(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_does_not_change_the_losses_of_training(policy: str, unchanged: list[float], tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "model.num_layers=4", *POLICIES[policy]), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(unchanged, abs=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_does_not_change_the_gradients(policy: str) -> None:
    plain, changed = module_of(spec("none")), module_of(spec(policy))
    loss_of(plain).backward()
    loss_of(changed).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), changed.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("policy", POLICIES)
def test_parameter_names_do_not_depend_on_the_policy(policy: str) -> None:
    assert [n for n, _ in module_of(spec(policy)).named_parameters()] == [
        s.name for s in shapes.parameters(spec(policy).model)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_names_the_blocks_that_recompute(policy: str) -> None:
    assert spec(policy).ckpt.layers_recomputed(4) == RECOMPUTED[policy]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_backward_runs_the_forward_of_exactly_these_blocks_again(policy: str, family: str) -> None:
    chosen = spec(policy, *FAMILIES[family])
    model = chosen.model
    loss = loss_of(module_of(chosen))
    with FlopCounterMode(display=False) as counted:
        loss.backward()
    without = 2 * shapes.step_flops(model, B, T) // 3
    # A block's last product does not run again: checkpoint stops once it has all saved tensors back.
    again = shapes.block_forward_flops(model, B, T) - 2 * B * T * model.d_mlp * model.d_model
    assert counted.get_total_flops() - without == len(RECOMPUTED[policy]) * again


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputing_blocks_and_no_others_keep_nothing_but_their_input(policy: str) -> None:
    found = []
    for index, block in enumerate(module_of(spec(policy)).blocks):
        x = torch.zeros(B, T, 128, requires_grad=True)
        known = {t.untyped_storage().data_ptr() for t in (x, *block.parameters())}
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, None)
        if all(t.numel() == 0 or t.untyped_storage().data_ptr() in known for t in kept):
            found.append(index)
    assert tuple(found) == RECOMPUTED[policy]
