"""The table in train/shapes.py against the real module: names, shapes, counts, activations, FLOPs."""

import csv
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from orchestrator.project import CONF_DIR
from tests.specs import train_spec
from train import shapes
from train.loss import cross_entropy
from train.model import Block, Transformer, build, rope_angles
from train.spec import ModelSpec

MODELS = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
PUBLISHED = list(csv.DictReader((Path(__file__).parent / "evidence" / "parameter_counts.csv").open(encoding="utf-8")))
B, T = 2, 16


def model_spec(*overrides: str) -> ModelSpec:
    return train_spec(*overrides).model


def gelu(*overrides: str) -> ModelSpec:
    """A small model of the GPT-2 family."""
    return model_spec("model=tiny", "model.num_layers=3", *overrides)


def swiglu(*overrides: str) -> ModelSpec:
    """A small model of the Llama family, where no two sizes are the same."""
    return model_spec(
        "model=llama3_8b",
        "model.num_layers=3",
        "model.d_model=48",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.head_dim=20",
        "model.d_mlp=112",
        "model.vocab_size=300",
        *overrides,
    )


VARIANTS = {
    "gelu": gelu(),
    "gelu, math": gelu("model.attention=math"),
    "gelu, GQA": gelu("model.num_kv_heads=2"),
    "gelu, no biases": gelu("model.attention_bias=false"),
    "gelu, rope": gelu("model.position=rope", "model.rope_theta=10000.0"),
    "swiglu": swiglu(),
    "swiglu, math": swiglu("model.attention=math"),
    "swiglu, qk_norm": swiglu("model.qk_norm=true"),
    "swiglu, qk_norm, math": swiglu("model.qk_norm=true", "model.attention=math"),
    "swiglu, learned positions": swiglu("model.position=learned", "model.context_length=32"),
}
variants = pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())


# Parameters.


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_parameters_is_what_the_module_has(name: str) -> None:
    model = model_spec(f"model={name}")
    real = [(n, tuple(p.shape)) for n, p in build(model).named_parameters()]
    assert [(s.name, s.dims) for s in shapes.parameters(model)] == real
    assert shapes.num_parameters(model) == sum(prod(dims) for _, dims in real)


@variants
def test_the_table_of_parameters_follows_every_option(model: ModelSpec) -> None:
    real = [(n, tuple(p.shape)) for n, p in build(model).named_parameters()]
    assert [(s.name, s.dims) for s in shapes.parameters(model)] == real


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_parameter_counts_are_the_published_ones(row: dict[str, str]) -> None:
    count = shapes.num_parameters(model_spec(f"model={row['model']}"))
    if row["parameters"].isdigit():
        assert count == int(row["parameters"])
    else:  # published in round numbers
        assert count == pytest.approx(float(row["parameters"]), rel=0.05)


def test_the_block_is_a_part_of_the_whole() -> None:
    model = swiglu()
    roots = sum(s.numel for s in shapes.root_parameters(model))
    assert shapes.num_parameters(model) == roots + 3 * shapes.block_num_parameters(model)


# Activations: every name in the table is one tensor of that shape that the real block makes.


class _Made(TorchDispatchMode):
    """Numbers held by each fresh piece of memory that operations take inside; views of others are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []
        self._seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if torch.is_tensor(leaf):
                self._seen.setdefault(leaf.untyped_storage().data_ptr(), leaf)
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in self._seen:
                self._seen[leaf.untyped_storage().data_ptr()] = leaf  # kept, so that its address is not used again
                self.numels.append(leaf.numel() * (2 if leaf.is_complex() else 1))
        return result


def _hooked(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes that the submodules of one real block take and give, under the names of the table."""
    block = Block(model)
    seen: dict[str, tuple[int, ...]] = {}
    names = {
        "attention_norm": "attention_norm",
        "attention.q": "q",
        "attention.k": "k",
        "attention.v": "v",
        "attention.q_norm": "q_normed",
        "attention.k_norm": "k_normed",
        "attention.o": "o",
        "mlp_norm": "mlp_norm",
        "mlp.gate": "mlp_gate",
        "mlp.up": "mlp_up",
        "mlp.down": "mlp_down",
    }
    for name, submodule in block.named_modules():
        if name in names:
            submodule.register_forward_hook(
                lambda m, args, out, key=names[name]: seen.__setitem__(key, tuple(out.shape))
            )
    block.attention.o.register_forward_hook(lambda m, args, out: seen.__setitem__("attention", tuple(args[0].shape)))
    block.mlp.down.register_forward_hook(lambda m, args, out: seen.__setitem__("mlp_act", tuple(args[0].shape)))
    block.mlp_norm.register_forward_hook(
        lambda m, args, out: seen.__setitem__("attention_residual", tuple(args[0].shape))
    )
    x = torch.zeros(B, T, model.d_model)
    seen["input"] = tuple(x.shape)
    seen["output"] = tuple(block(x, _rope(model)).shape)
    return seen


def _rope(model: ModelSpec) -> torch.Tensor | None:
    return rope_angles(model, T, torch.device("cpu")) if model.position == "rope" else None


@variants
def test_submodules_give_tensors_of_the_tabled_shapes(model: ModelSpec) -> None:
    table = {s.name: s for s in shapes.block_activations(model, B, T)}
    for name, dims in _hooked(model).items():
        assert table[name].numel == prod(dims), name


@variants
def test_every_tabled_activation_is_made_by_an_operation_of_the_block(model: ModelSpec) -> None:
    block, x = Block(model), torch.zeros(B, T, model.d_model)
    with _Made() as made:
        block(x, _rope(model))
    real = Counter(made.numels)
    tabled = Counter(s.numel for s in shapes.block_activations(model, B, T) if s.name != "input")
    assert not tabled - real


@variants
def test_fused_attention_makes_no_square_and_math_attention_makes_two(model: ModelSpec) -> None:
    names = {s.name: s.dims for s in shapes.block_activations(model, B, T) if s.dims[-2:] == (T, T)}
    square = (B, model.num_heads, T, T)
    expected = {"attention_scores": square, "attention_probs": square} if model.attention == "math" else {}
    assert names == expected


def test_the_log_sum_exp_of_fused_attention_has_the_tabled_shape() -> None:
    model = gelu()
    q = torch.zeros(B, model.num_heads, T, model.head_dim)
    lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[1]
    table = {s.name: s.dims for s in shapes.block_activations(model, B, T)}
    assert table["attention_lse"] == tuple(lse.shape)
    assert lse.dtype == torch.float32


# The outputs that ckpt.save names.


@pytest.mark.parametrize(
    ("model", "save", "kept"),
    [
        (gelu(), "attention", {"attention"}),
        (gelu(), "qkv", {"q", "k", "v"}),
        (gelu(), ("q", "qkv", "mlp_up"), {"q", "k", "v", "mlp_up"}),
        (gelu(), "every_second_matmul", {"attention", "q", "v", "mlp_up"}),
        (swiglu(), "every_second_matmul", {"attention", "q", "v", "mlp_gate", "mlp_down"}),
        (swiglu(), ("every_second_matmul", "o"), {"attention", "q", "v", "o", "mlp_gate", "mlp_down"}),
    ],
)
def test_a_name_of_what_to_keep_stands_for_outputs_of_the_block(
    model: ModelSpec, save: str | tuple[str, ...], kept: set[str]
) -> None:
    assert shapes.saved_ops(model, save) == kept


@variants
def test_every_linear_layer_of_the_real_block_has_a_name_to_keep_its_output_by(model: ModelSpec) -> None:
    block = Block(model)
    names = {maker: name for name, maker in block.makers().items()}
    linears = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
    assert [names[linear] for linear in linears] == list(shapes.block_matmuls(model))
    assert set(names.values()) == {"attention", *shapes.block_matmuls(model)}
    assert set(names.values()) <= {s.name for s in shapes.block_activations(model, B, T)}


# FLOPs, by counting them.


def _sdpa_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return sdpa_flop_count(q_shape, q_shape[:1] + q_shape[1:2] + k_shape[2:], q_shape[:2] + v_shape[2:])


CPU_FLASH = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flops}


def _counted(model: ModelSpec) -> tuple[int, int, int]:
    """FLOPs of one block's forward, of the whole forward and of the whole backward, counted."""
    module = Transformer(model)
    tokens = torch.zeros(B, T, dtype=torch.long)
    x = torch.zeros(B, T, model.d_model)
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as block:
        module.blocks[0](x, _rope(model))
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as forward:
        loss = cross_entropy(module(tokens), tokens)
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as backward:
        loss.backward()
    return block.get_total_flops(), forward.get_total_flops(), backward.get_total_flops()


@variants
def test_forward_flops_are_what_the_counter_counts(model: ModelSpec) -> None:
    block, forward, _ = _counted(model)
    assert shapes.block_forward_flops(model, B, T) == block
    assert 3 * shapes.block_forward_flops(model, B, T) + shapes.head_forward_flops(model, B, T) == forward


@pytest.mark.parametrize("model", [m for m in VARIANTS.values() if m.attention == "math"])
def test_step_flops_are_what_the_counter_counts_with_math_attention(model: ModelSpec) -> None:
    _, forward, backward = _counted(model)
    assert shapes.step_flops(model, B, T) == forward + backward
