"""The operations of a transformer block and of the last norm, as lines that `graph` follows.

Takes a ModelSpec, batch sizes, a precision and a kind of device; sizes come from train/shapes.py. What each
operation keeps was read off autograd on CPU (tests/test_saved_tensors.py) and, for CUDA's fused kernels, off
torch/csrc/autograd (derivatives.yaml) and aten/src/ATen/native/transformers/cuda.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from orchestrator.memory.graph import INPUT, Op, Saved
from train import shapes
from train.spec import TrainSpec

FP32 = 4
WIDTH = {"fp32": FP32, "bf16": 2, "bool": 1, "int64": 8}
"""Bytes of a number."""
_ALLOCATION_BYTES = 512
"""CUDA's allocator gives multiples of it (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides the sizes and kernels of one rank's micro-batch."""

    spec: TrainSpec
    dtype: str
    """Of computation: fp32 or bf16."""
    on_cuda: bool
    fused_rms_norm: bool
    """CUDA has a kernel that keeps its input and 1/rms; elsewhere rms_norm is a chain of operations in fp32."""

    @property
    def width(self) -> int:
        """Bytes of a number in the compute precision."""
        return WIDTH[self.dtype]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.spec.train.micro_batch * self.spec.train.seq_len

    @property
    def hidden_bytes(self) -> int:
        """One tensor of the residual stream."""
        return self.size(self.tokens * self.spec.model.d_model * self.width)

    def size(self, count: int) -> int:
        """Bytes that a tensor of `count` bytes takes: on CUDA a multiple of 512."""
        return -(-count // _ALLOCATION_BYTES) * _ALLOCATION_BYTES if self.on_cuda else count


def setting(spec: TrainSpec) -> Setting:
    """The setting of a spec whose device is resolved."""
    on_cuda = spec.device.kind == "cuda"
    dtype = "fp32" if spec.train.precision == "fp32" else "bf16"
    return Setting(spec=spec, dtype=dtype, on_cuda=on_cuda, fused_rms_norm=on_cuda)


class _Line:
    """Adds operations whose sizes come from the table."""

    def __init__(self, here: Setting, parameters: Iterable[shapes.Shape]) -> None:
        self.here = here
        loop = here.spec.train
        table = shapes.block_activations(here.spec.model, loop.micro_batch, loop.seq_len)
        self.dims = {shape.name: shape.dims for shape in table} | {"output": table[0].dims}
        self.parameters = {shape.name: shape for shape in parameters}
        self.ops: list[Op] = []

    def grads_of(self, prefix: str) -> int:
        """Bytes of the gradients of a layer's parameters."""
        here, found = self.here, 0
        for name in (f"{prefix}.weight", f"{prefix}.bias"):
            if name in self.parameters:
                found += here.size(self.parameters[name].numel * here.width)
        return found

    def add(self, output: str, kind: str, inputs: tuple[str, ...], dims: tuple[int, ...] = (), **rest: Any) -> None:
        """An operation named for its output; `rest` are the other fields of Op."""
        here, dims = self.here, dims or self.dims[output]
        self.ops.append(Op(output, kind, inputs, dims, here.dtype, here.size(prod(dims) * here.width), **rest))

    def saved(self, name: str, dims: tuple[int, ...], dtype: str) -> Saved:
        """A tensor made for backward alone."""
        return Saved(name, dims, dtype, self.here.size(prod(dims) * WIDTH[dtype]))

    def linear(self, x: str, out: str, parameter: str, holds: tuple[str, ...] = ()) -> None:
        """A matrix product that keeps its input."""
        self.add(
            out,
            "linear",
            (x,),
            keeps=(x,),
            entry=out,
            flops=2 * self.here.tokens * self.parameters[f"{parameter}.weight"].numel,
            parameter_grad_bytes=self.grads_of(parameter),
            holds=holds,
        )

    def norm(self, x: str, out: str, parameter: str) -> None:
        """layernorm keeps its input and two numbers a row; rmsnorm see `_composite_rms_norm`."""
        model, here = self.here.spec.model, self.here
        layernorm = model.norm == "layernorm" and not parameter.endswith(("q_norm", "k_norm"))
        if not layernorm and not here.fused_rms_norm:
            return self._composite_rms_norm(x, out, parameter)
        rows = (*self.dims[out][:-1], 1)
        stat_dtype = "fp32" if here.on_cuda else here.dtype
        stats = ("mean", "rstd") if layernorm else ("rstd",)
        return self.add(
            out,
            "layer_norm" if layernorm else "rms_norm",
            (x,),
            keeps=(x,),
            hidden=tuple(self.saved(f"{out}.{stat}", rows, stat_dtype) for stat in stats),
            parameter_grad_bytes=self.grads_of(parameter),
        )

    def _composite_rms_norm(self, x: str, out: str, parameter: str) -> None:
        """A chain in fp32: it keeps the fp32 input (a copy in bf16), 1/rms and x/rms.

        At the peak of its backward five fp32 tensors of its size are alive, x/rms and the output's gradient are
        gone.
        """
        dims, in_fp32 = self.dims[out], self.here.dtype == "fp32"
        n = prod(dims)
        copy = () if in_fp32 else (self.saved(f"{x}.float", dims, "fp32"),)
        self.add(
            out,
            "rms_norm",
            (x,),
            keeps=(x,) if in_fp32 else (),
            hidden=(
                *copy,
                self.saved(f"{out}.rstd", (*dims[:-1], 1), "fp32"),
                self.saved(f"{out}.normalized", dims, "fp32"),
            ),
            forward_scratch_bytes=0 if in_fp32 else n * FP32,
            forward_only_less_bytes=0 if in_fp32 else n * self.here.width,
            backward_scratch_bytes=n * (4 * FP32 - self.here.width),
            parameter_grad_bytes=self.grads_of(parameter),
        )

    def rotate(self, x: str, out: str) -> None:
        """A complex product in fp32; keeps nothing but the angles, which all blocks share."""
        n, width = prod(self.dims[out]), self.here.width
        in_fp32 = 0 if width == FP32 else 2 * n * FP32
        angles = self.here.spec.train.seq_len * self.here.spec.model.head_dim * FP32
        self.add(
            out,
            "rotate",
            (x,),
            forward_scratch_bytes=in_fp32,
            backward_scratch_bytes=n * width + angles + in_fp32,
        )

    def attention(self, q: str, k: str, v: str) -> None:
        """Fused: keeps q, k, v, its output and the log-sum-exp; math: see `_math_attention`."""
        if self.here.spec.model.attention == "math":
            return self._math_attention(q, k, v)
        here, n = self.here, prod(self.dims["attention"])
        lse = self.saved("attention_lse", self.dims["attention_lse"], "fp32")
        # FlashAttention-2's backward adds up the queries' gradient in fp32 beside the row sums.
        scratch = n * FP32 + lse.size_bytes if here.on_cuda else 0
        grads = sum(here.size(prod(self.dims[name]) * here.width) for name in (q, k, v))
        return self.add(
            "attention",
            "scaled_dot_product_attention",
            (q, k, v),
            keeps=(q, k, v, "attention"),
            hidden=(lse,),
            entry="attention",
            flops=self._attention_flops(),
            backward_scratch_bytes=grads + scratch,
        )

    def _attention_flops(self) -> int:
        model, loop = self.here.spec.model, self.here.spec.train
        return shapes.attention_forward_flops(model, loop.micro_batch, loop.seq_len)

    def _math_attention(self, q: str, k: str, v: str) -> None:
        """Products of contiguous copies of q, k and v of all heads; keeps these, the mask and the probabilities.

        Its frame names the scores until it returns (train/model.py).
        """
        here, heads = self.here, self.dims["attention"]
        model, seq_len = here.spec.model, here.spec.train.seq_len
        self.add("q_scaled", "mul", (q,), heads)
        repeated = model.num_kv_heads != model.num_heads
        if repeated:
            self.add("k_repeated", "repeat_interleave", (k,), heads)
            self.add("v_repeated", "repeat_interleave", (v,), heads)
            k, v = "k_repeated", "v_repeated"
        # bmm takes batch and heads as one: a copy, but for one sequence, one head, or what was repeated into order.
        in_order = here.spec.train.micro_batch == 1 or model.num_heads == 1
        inputs = (self._one_batch("q_scaled", in_order), self._one_batch(k, in_order or repeated))
        half = self._attention_flops() // 2
        self.add("attention_scores", "bmm", inputs, keeps=inputs, flops=half, holds=("q_scaled",))
        mask = self.saved("mask", (seq_len, seq_len), "bool")
        scratch = mask.size_bytes
        self.add(
            "masked_scores",
            "masked_fill",
            ("attention_scores",),
            self.dims["attention_scores"],
            hidden=(mask,),
            forward_scratch_bytes=scratch,
        )
        self.add("attention_probs", "softmax", ("masked_scores",), keeps=("attention_probs",))
        inputs = ("attention_probs", self._one_batch(v, in_order or repeated))
        holds = ("attention_scores", q, k, v)
        self.add("attention_heads", "bmm", inputs, heads, keeps=inputs, entry="attention", flops=half, holds=holds)
        self.add("attention", "clone", ("attention_heads",), backward_is_view=True)

    def _one_batch(self, x: str, in_order: bool) -> str:
        """The name of `x` with batch and heads as one dim, which is a copy unless its numbers are in order."""
        if in_order:
            return x
        self.add(f"{x}_batch", "clone", (x,), self.dims["attention"], backward_is_view=True)
        return f"{x}_batch"

    def dropout(self, x: str) -> str:
        """The name of `x` after dropout: on CUDA it keeps a mask of bools, elsewhere the mask as numbers."""
        here = self.here
        if here.spec.train.dropout == 0:
            return x
        out = f"{x}_dropout"
        mask = self.saved(f"{out}.mask", self.dims[x], "bool" if here.on_cuda else here.dtype)
        self.add(out, "dropout", (x,), self.dims[x], hidden=(mask,))
        return out

    def residual(self, x: str, y: str, out: str) -> None:
        """A sum, which keeps nothing."""
        self.add(out, "add", (x, y), passes_gradient=True)


def block_ops(here: Setting) -> tuple[Op, ...]:
    """One block, from `input` to `output`, in the order of train/model.py."""
    model = here.spec.model
    line = _Line(here, shapes.block_parameters(model))
    line.norm(INPUT, "attention_norm", "attention_norm")
    for name in ("q", "k", "v"):
        line.linear("attention_norm", name, f"attention.{name}")
    q, k = "q", "k"
    if model.qk_norm:
        line.norm("q", "q_normed", "attention.q_norm")
        line.norm("k", "k_normed", "attention.k_norm")
        q, k = "q_normed", "k_normed"
    if model.position == "rope":
        line.rotate(q, "q_rotated")
        line.rotate(k, "k_rotated")
        q, k = "q_rotated", "k_rotated"
    line.attention(q, k, "v")
    line.linear("attention", "o", "attention.o", holds=("attention_norm", q, k, "v"))
    line.residual(INPUT, line.dropout("o"), "attention_residual")
    line.norm("attention_residual", "mlp_norm", "mlp_norm")
    _mlp(line)
    line.residual("attention_residual", line.dropout("mlp_down"), "output")
    return tuple(line.ops)


def _mlp(line: _Line) -> None:
    if line.here.spec.model.mlp == "gelu":
        line.linear("mlp_norm", "mlp_up", "mlp.up")
        line.add("mlp_act", "gelu", ("mlp_up",), keeps=("mlp_up",))
    else:
        line.linear("mlp_norm", "mlp_gate", "mlp.gate")
        line.add("mlp_silu", "silu", ("mlp_gate",), keeps=("mlp_gate",))
        line.linear("mlp_norm", "mlp_up", "mlp.up")
        line.add("mlp_act", "mul", ("mlp_silu", "mlp_up"), keeps=("mlp_silu", "mlp_up"))
    line.linear("mlp_act", "mlp_down", "mlp.down", holds=("mlp_norm",))


def last_norm_ops(here: Setting) -> tuple[Op, ...]:
    """The norm before the head, from `input` to `output`."""
    line = _Line(here, shapes.root_parameters(here.spec.model))
    line.norm(INPUT, "output", "norm")
    return tuple(line.ops)
