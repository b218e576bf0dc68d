"""Activation checkpointing: the same training, the same names, and as much recomputed and kept as the policy says."""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.live_bytes import LiveBytes
from tests.small_run import log, losses, on_ranks, one_rank, small_spec, train_here
from tests.specs import train_spec
from tests.test_shapes import CPU_FLASH
from train import shapes
from train.activation import apply_checkpointing
from train.loss import batch_loss, cross_entropy
from train.model import Attention, Transformer, build, rotate
from train.parallel import build_sharded
from train.spec import CkptSpec, ModelSpec, TrainSpec

POLICIES = {
    "none": ("ckpt=none",),
    "full": ("ckpt=full",),
    "every second": ("ckpt=selective", "ckpt.every=2"),
    "these": ("ckpt=selective", "ckpt.layers=[0,3]"),
    "the first three": ("ckpt=selective", "ckpt.first=3"),
    "the first none": ("ckpt=selective", "ckpt.first=0"),
    "the last three": ("ckpt=selective", "ckpt.last=3"),
    "the last none": ("ckpt=selective", "ckpt.last=0"),
}
RECOMPUTED = {
    "none": (),
    "full": (0, 1, 2, 3),
    "every second": (1, 3),
    "these": (0, 3),
    "the first three": (0, 1, 2),
    "the first none": (),
    "the last three": (1, 2, 3),
    "the last none": (),
}
SINGLE = ("attention", "q", "k", "v", "o", "mlp_gate", "mlp_up", "mlp_down")
SAVES = (
    *SINGLE,
    "qkv",
    "every_second_matmul",
    "[attention,qkv]",
    "[o,mlp_up]",
    "[k,mlp_down]",
    "[attention,qkv,o,mlp_up,mlp_down]",
)
OPS = {save: ("ckpt=ops", f"ckpt.save={save}") for save in SAVES} | {
    "ops every second": ("ckpt=ops", "ckpt.save=attention", "ckpt.every=2"),
    "ops these": ("ckpt=ops", "ckpt.save=qkv", "ckpt.layers=[0,3]"),
    "ops the first two": ("ckpt=ops", "ckpt.save=o", "ckpt.first=2"),
    "ops the last two": ("ckpt=ops", "ckpt.save=mlp_up", "ckpt.last=2"),
}
SWIGLU = ("model.mlp=swiglu", "model.norm=rmsnorm", "model.position=rope", "model.rope_theta=10000.0")
FAMILIES = {"gelu": (), "swiglu": SWIGLU}
GQA = (*SWIGLU, "model.num_kv_heads=2", "model.qk_norm=true", "model.attention_bias=false")
WIDE_FAMILIES = {"gelu": (), "swiglu with GQA and QK-norm": GQA}
B, T, SEED = 2, 32, 7
CPU = torch.device("cpu")


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


@cache
def composed(*overrides: str) -> TrainSpec:
    return train_spec("model=tiny", *overrides)


@cache
def ckpt_of(policy: str) -> CkptSpec:
    """Composed with the model that has every name, so that one policy serves both families."""
    return composed(*SWIGLU, *(OPS | POLICIES)[policy]).ckpt


def module_of(spec: TrainSpec) -> Transformer:
    """Checkpointed and filled with the same numbers each time."""
    module = build(spec.model, dropout=spec.train.dropout)
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


def gradients(spec: TrainSpec) -> dict[str, Tensor]:
    """Of the real sharded module, of this rank's own tokens and dropout; needs a process group."""
    module = build_sharded(spec, CPU)
    torch.manual_seed(SEED + dist.get_rank())
    tokens = torch.randint(0, 256, (B, T))
    batch_loss(spec.train, module, tokens, tokens.roll(1)).backward()
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.to_local().clone()
    return found


def unequal(spec: TrainSpec, expected: dict[str, Tensor]) -> list[str]:
    """Parameters whose gradient differs in any bit."""
    found = gradients(spec)
    assert found.keys() == expected.keys()
    return [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])]


# The same training.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_does_not_change_the_losses_of_training(policy: str, unchanged: list[float], tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "model.num_layers=4", *POLICIES[policy]), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(unchanged, abs=1e-6)


@pytest.mark.parametrize("save", ["every_second_matmul", "[attention,qkv]"])
def test_ops_with_a_chunked_loss_does_not_change_the_losses_of_training(
    save: str, unchanged: list[float], tmp_path: Path
) -> None:
    overrides = ("model.num_layers=4", "ckpt=ops", f"ckpt.save={save}", "train.loss=chunked")
    train_here(small_spec(tmp_path, *overrides), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(unchanged, abs=1e-6)


@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("family", WIDE_FAMILIES)
def test_no_policy_changes_a_bit_of_the_gradients(family: str, attention: str, precision: str, dropout: str) -> None:
    plain = composed(
        f"model.attention={attention}",
        f"train.precision={precision}",
        f"train.dropout={dropout}",
        *WIDE_FAMILIES[family],
    )
    expected = gradients(plain)
    assert all(torch.any(gradient != 0) for gradient in expected.values() if gradient.dim() == 2)
    for policy in POLICIES | OPS:
        if policy == "mlp_gate" and plain.model.mlp == "gelu":
            continue
        assert unequal(plain.model_copy(update={"ckpt": ckpt_of(policy)}), expected) == [], policy


def test_dropout_changes_the_gradients_that_the_policies_are_held_to() -> None:
    plain, dropped = gradients(composed()), gradients(composed("train.dropout=0.2"))
    assert not any(torch.equal(plain[name], dropped[name]) for name in plain if plain[name].dim() == 2)


def _compare_on_rank(cases: dict[str, tuple[TrainSpec, dict[str, TrainSpec]]], file: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for name, (plain, specs) in cases.items():
        expected = gradients(plain)
        found[name] = {policy: unequal(spec, expected) for policy, spec in specs.items()}
    Path(f"{file}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_no_policy_changes_a_bit_of_the_gradients_on_two_ranks(tmp_path: Path) -> None:
    settings = {
        "fp32": (),
        "dropout": ("train.dropout=0.2",),
        "bf16_mixed, dropout, math": ("train.precision=bf16_mixed", "train.dropout=0.2", "model.attention=math"),
        "bf16": ("train.precision=bf16",),
        "never resharded": ("parallel.reshard_after_forward=never", "train.dropout=0.2"),
        "chunked loss": ("train.loss=chunked", "train.precision=bf16_mixed", "train.dropout=0.2"),
    }
    policies = ("full", "the first three", "every_second_matmul", "[o,mlp_up]", "ops the last two")
    cases = {}
    for (family, model), (setting, overrides) in itertools.product(WIDE_FAMILIES.items(), settings.items()):
        plain = composed("parallel.devices_per_node=2", *model, *overrides)
        specs = {policy: plain.model_copy(update={"ckpt": ckpt_of(policy)}) for policy in policies}
        cases[f"{family}, {setting}"] = plain, specs
    assert on_ranks(2, tmp_path, _compare_on_rank, cases, str(tmp_path / "unequal")) == [0, 0], log(tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"unequal.{rank}").read_text(encoding="utf-8"))
        assert found == {name: {policy: [] for policy in policies} for name in cases}


@pytest.mark.parametrize("policy", POLICIES | OPS)
def test_parameter_names_do_not_depend_on_the_policy(policy: str) -> None:
    spec = composed(*SWIGLU).model_copy(update={"ckpt": ckpt_of(policy)})
    assert [n for n, _ in module_of(spec).named_parameters()] == [s.name for s in shapes.parameters(spec.model)]


# Which blocks.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_names_the_blocks_that_recompute(policy: str) -> None:
    assert spec(policy).ckpt.layers_recomputed(4) == RECOMPUTED[policy]


def test_ops_names_its_blocks_as_selective_does() -> None:
    assert ckpt_of("attention").layers_recomputed(4) == (0, 1, 2, 3)
    assert ckpt_of("ops every second").layers_recomputed(4) == (1, 3)
    assert ckpt_of("ops these").layers_recomputed(4) == (0, 3)
    assert ckpt_of("ops the first two").layers_recomputed(4) == (0, 1)
    assert ckpt_of("ops the last two").layers_recomputed(4) == (2, 3)


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


# What ckpt=ops keeps, and what it therefore does not run again.


def product_flops(model: ModelSpec) -> dict[str, int]:
    """FLOPs of each output of one block that a product or the attention makes; `scores` with math attention."""
    found = {}
    for parameter in shapes.block_parameters(model):
        if len(parameter.dims) == 2:
            name = parameter.name.removesuffix(".weight").removeprefix("attention.").replace(".", "_")
            found[name] = 2 * B * T * parameter.numel
    square = 2 * B * model.num_heads * T * T * model.head_dim
    if model.attention == "math":
        return found | {"scores": square, "attention": square}
    return found | {"attention": 2 * square}


def backward_flops(spec: TrainSpec) -> int:
    loss = loss_of(module_of(spec))
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as counted:
        loss.backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("family", WIDE_FAMILIES)
def test_ops_runs_every_product_again_but_the_named_ones(family: str, attention: str, dropout: str) -> None:
    plain = composed(f"model.attention={attention}", f"train.dropout={dropout}", *WIDE_FAMILIES[family])
    flops = product_flops(plain.model)
    without = backward_flops(plain)
    for save in SAVES:
        ckpt = ckpt_of(save)
        assert ckpt.save is not None
        kept = shapes.saved_ops(plain.model, ckpt.save)
        if not kept <= flops.keys():
            continue  # mlp_gate where there is none
        # Checkpoint stops before the last product, unless dropout follows and must be drawn again.
        again = flops.keys() - kept - (set() if plain.train.dropout else {"mlp_down"})
        found = backward_flops(plain.model_copy(update={"ckpt": ckpt})) - without
        assert found == plain.model.num_layers * sum(flops[name] for name in again), save


def held_by(spec: TrainSpec) -> int:
    """Bytes alive because of one block's output, which itself counts."""
    block = module_of(spec).blocks[0]
    x = torch.randn(B, T, spec.model.d_model, requires_grad=True)
    live = LiveBytes()
    with live:
        output = block(x, None)
    assert output.requires_grad
    return live.total()


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("family", ["gelu", "swiglu"])
def test_a_block_keeps_the_bytes_of_the_named_outputs_and_no_more(family: str, attention: str) -> None:
    mlp = ("model.mlp=swiglu", "model.norm=rmsnorm") if family == "swiglu" else ()
    plain = composed("model.num_kv_heads=2", f"model.attention={attention}", *mlp)
    table = {s.name: 4 * s.numel for s in shapes.block_activations(plain.model, B, T)}
    for save in SAVES:
        ckpt = ckpt_of(save)
        assert ckpt.save is not None
        names = shapes.saved_ops(plain.model, ckpt.save)
        if not names <= table.keys():
            continue
        expected = sum(table[name] for name in names)
        if attention == "sdpa" and "attention" in names:
            expected += table["attention_lse"]
        assert (
            held_by(plain.model_copy(update={"ckpt": ckpt}))
            - held_by(plain.model_copy(update={"ckpt": ckpt_of("full")}))
            == expected
        ), save


def test_without_gradients_nothing_is_kept() -> None:
    module = module_of(composed("ckpt=ops"))
    live = LiveBytes()
    with torch.no_grad(), live:
        output = module.blocks[0](torch.randn(B, T, 128), None)
    del output
    parameters = sum(p.nbytes for p in module.blocks[0].parameters())
    assert live.total() <= parameters  # views of them are counted as they pass


def _reordered(self: Attention, x: Tensor, rope: Tensor | None) -> Tensor:
    """Attention.forward with its projections called from the last to the first."""
    heads, kv_heads, width = self.model.num_heads, self.model.num_kv_heads, self.model.head_dim
    v = self.v(x).unflatten(-1, (kv_heads, width))
    k = self.k(x).unflatten(-1, (kv_heads, width))
    q = self.q(x).unflatten(-1, (heads, width))
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return self.o(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("save", ["q", "v"])
def test_the_order_of_the_calls_does_not_change_what_is_kept(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of two key-value heads the projections are half as large as that of the queries: another one would show.
    chosen = composed("model.num_kv_heads=2").model_copy(update={"ckpt": ckpt_of(save)})
    before = backward_flops(chosen), held_by(chosen)
    monkeypatch.setattr(Attention, "forward", _reordered)
    assert (backward_flops(chosen), held_by(chosen)) == before


def test_an_attention_that_runs_in_pieces_is_refused_and_not_kept_in_part() -> None:
    module = module_of(composed("ckpt=ops", "ckpt.save=attention"))
    with (
        sdpa_kernel(SDPBackend.MATH),
        pytest.raises(RuntimeError, match=r"^ckpt\.save=attention: it is to keep one product, and torch made 2 there"),
    ):
        loss_of(module)
