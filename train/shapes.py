"""The one table of parameter and activation shapes; the model is built from it, the estimate reads it.

Takes a ModelSpec (and batch sizes), gives named shapes and counts. It must not import torch.
Held against the real module, on the meta device, by tests/test_shapes.py for every conf/model/*.yaml.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

from train.spec import ModelSpec

LOSS_CHUNKS = 8
"""Into how many slices of tokens train.loss=chunked divides a micro-batch."""
_EVERY_SECOND = "every_second_matmul"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A named tensor; of a parameter the name is the one in the module."""

    name: str
    dims: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.dims)


def norm_parameters(model: ModelSpec, name: str, width: int) -> list[Shape]:
    """Scale, and for layernorm a bias, over `width` features."""
    shapes = [Shape(name=f"{name}.weight", dims=(width,))]
    if model.norm == "layernorm":
        shapes.append(Shape(name=f"{name}.bias", dims=(width,)))
    return shapes


def linear_parameters(name: str, d_out: int, d_in: int, bias: bool) -> list[Shape]:
    """A matrix (d_out, d_in) and perhaps a bias (d_out,)."""
    shapes = [Shape(name=f"{name}.weight", dims=(d_out, d_in))]
    if bias:
        shapes.append(Shape(name=f"{name}.bias", dims=(d_out,)))
    return shapes


@cache
def block_parameters(model: ModelSpec) -> tuple[Shape, ...]:
    """Parameters of one transformer block, in the module's order; names without the block's own prefix."""
    d, hd, kv = model.d_model, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = norm_parameters(model, "attention_norm", d)
    shapes += linear_parameters("attention.q", hd, d, model.attention_bias)
    shapes += linear_parameters("attention.k", kv, d, model.attention_bias)
    shapes += linear_parameters("attention.v", kv, d, model.attention_bias)
    shapes += linear_parameters("attention.o", d, hd, model.attention_bias)
    if model.qk_norm:
        shapes.append(Shape(name="attention.q_norm.weight", dims=(model.head_dim,)))
        shapes.append(Shape(name="attention.k_norm.weight", dims=(model.head_dim,)))
    shapes += norm_parameters(model, "mlp_norm", d)
    gelu = model.mlp == "gelu"
    if not gelu:
        shapes += linear_parameters("mlp.gate", model.d_mlp, d, False)
    shapes += linear_parameters("mlp.up", model.d_mlp, d, gelu)
    shapes += linear_parameters("mlp.down", d, model.d_mlp, gelu)
    return tuple(shapes)


@cache
def root_parameters(model: ModelSpec) -> tuple[Shape, ...]:
    """Parameters outside the blocks: embedding, learned positions, last norm, untied head."""
    shapes = [Shape(name="embedding.weight", dims=(model.vocab_size, model.d_model))]
    if model.position == "learned":
        shapes.append(Shape(name="positions.weight", dims=(model.context_length, model.d_model)))
    shapes += norm_parameters(model, "norm", model.d_model)
    if not model.tie_embeddings:
        shapes += linear_parameters("head", model.vocab_size, model.d_model, False)
    return tuple(shapes)


def parameters(model: ModelSpec) -> tuple[Shape, ...]:
    """All parameters under the names that the whole module gives them, in its order."""
    root = root_parameters(model)
    before = tuple(s for s in root if s.name in ("embedding.weight", "positions.weight"))
    blocks = tuple(
        Shape(name=f"blocks.{i}.{s.name}", dims=s.dims)
        for i in range(model.num_layers)
        for s in block_parameters(model)
    )
    return before + blocks + root[len(before) :]


def block_num_parameters(model: ModelSpec) -> int:
    """Parameters of one block."""
    return sum(s.numel for s in block_parameters(model))


def num_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model; a tied head counts once."""
    return sum(s.numel for s in root_parameters(model)) + model.num_layers * block_num_parameters(model)


def block_matmuls(model: ModelSpec) -> tuple[str, ...]:
    """Outputs of one block's linear layers, in the order of block_parameters; names of block_activations."""
    names = (s.name.removesuffix(".weight") for s in block_parameters(model) if len(s.dims) == 2)
    return tuple(name.removeprefix("attention.").replace(".", "_") for name in names)


def saved_ops(model: ModelSpec, save: str | tuple[str, ...]) -> frozenset[str]:
    """The outputs that a recomputing block keeps under ckpt.save, as names of block_activations.

    qkv stands for q, k and v; every_second_matmul, as in torchtitan's op-level selective policy, for the attention
    and every other linear layer from the first (q, v, and mlp_gate and mlp_down, or mlp_up without a gate).
    """
    groups = {"qkv": ("q", "k", "v"), _EVERY_SECOND: ("attention", *block_matmuls(model)[::2])}
    names = (save,) if isinstance(save, str) else save
    return frozenset(output for name in names for output in groups.get(name, (name,)))


@cache
def block_activations(model: ModelSpec, micro_batch: int, seq_len: int) -> tuple[Shape, ...]:
    """Outputs of the operations of one block in order, each of shape as the module makes it.

    B sequences of T tokens; H heads of width D. `attention_lse` (log-sum-exp, fp32 whatever the
    precision) is there with fused attention, `attention_scores` and `attention_probs` with
    model.attention=math.
    """
    b, t, d = micro_batch, seq_len, model.d_model
    h, kv, hd = model.num_heads, model.num_kv_heads, model.head_dim
    shapes = [Shape(name="input", dims=(b, t, d)), Shape(name="attention_norm", dims=(b, t, d))]
    shapes += [Shape(name="q", dims=(b, t, h, hd))]
    shapes += [Shape(name=name, dims=(b, t, kv, hd)) for name in ("k", "v")]
    if model.qk_norm:
        shapes += [Shape(name="q_normed", dims=(b, t, h, hd)), Shape(name="k_normed", dims=(b, t, kv, hd))]
    if model.position == "rope":
        shapes += [Shape(name="q_rotated", dims=(b, t, h, hd)), Shape(name="k_rotated", dims=(b, t, kv, hd))]
    if model.attention == "math":
        shapes += [Shape(name=f"attention_{name}", dims=(b, h, t, t)) for name in ("scores", "probs")]
    else:
        shapes.append(Shape(name="attention_lse", dims=(b, h, t)))
    shapes.append(Shape(name="attention", dims=(b, t, h, hd)))
    shapes += [Shape(name=name, dims=(b, t, d)) for name in ("o", "attention_residual", "mlp_norm")]
    if model.mlp == "swiglu":
        shapes += [
            Shape(name="mlp_gate", dims=(b, t, model.d_mlp)),
            Shape(name="mlp_silu", dims=(b, t, model.d_mlp)),
        ]
    shapes += [
        Shape(name="mlp_up", dims=(b, t, model.d_mlp)),
        Shape(name="mlp_act", dims=(b, t, model.d_mlp)),
    ]
    shapes += [Shape(name=name, dims=(b, t, d)) for name in ("mlp_down", "output")]
    return tuple(shapes)


def attention_forward_flops(model: ModelSpec, micro_batch: int, seq_len: int) -> int:
    """FLOPs of one block's attention without its linear layers, the full (T, T) square as FlopCounterMode counts."""
    return 4 * micro_batch * model.num_heads * seq_len * seq_len * model.head_dim


def block_forward_flops(model: ModelSpec, micro_batch: int, seq_len: int) -> int:
    """FLOPs of one block's forward pass: two per multiply-add of its matrices and of attention."""
    matrices = sum(s.numel for s in block_parameters(model) if len(s.dims) == 2)
    return 2 * micro_batch * seq_len * matrices + attention_forward_flops(model, micro_batch, seq_len)


def head_forward_flops(model: ModelSpec, micro_batch: int, seq_len: int) -> int:
    """FLOPs of the projection to the vocabulary."""
    return 2 * micro_batch * seq_len * model.vocab_size * model.d_model


def step_flops(model: ModelSpec, micro_batch: int, seq_len: int) -> int:
    """FLOPs of one forward and backward without recomputation; backward counts twice the forward."""
    forward = model.num_layers * block_forward_flops(model, micro_batch, seq_len)
    return 3 * (forward + head_forward_flops(model, micro_batch, seq_len))
