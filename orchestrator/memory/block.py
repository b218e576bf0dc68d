"""The operations of a transformer block and of the last norm with the head, as lines that `graph` follows.

Takes a ModelSpec, batch sizes, a precision and a kind of device; sizes come from train/shapes.py. What each
operation keeps was read off autograd on CPU (tests/test_memory.py) and, for CUDA's fused kernels, off
torch/csrc/autograd (derivatives.yaml) and aten/src/ATen/native/transformers/cuda.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.memory.graph import Op
from orchestrator.memory.states import FP32
from train import shapes
from train.spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides the sizes and kernels of one rank's micro-batch."""

    spec: TrainSpec
    width: int
    """Bytes of a number in the compute precision."""
    on_cuda: bool

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.spec.train.micro_batch * self.spec.train.seq_len

    @property
    def hidden_bytes(self) -> int:
        """One tensor of the residual stream."""
        return self.tokens * self.spec.model.d_model * self.width


def setting(spec: TrainSpec) -> Setting:
    """The setting of a spec whose device is resolved."""
    width = FP32 if spec.train.precision == "fp32" else 2
    return Setting(spec=spec, width=width, on_cuda=spec.device.kind == "cuda")


class _Line:
    """Adds operations whose sizes come from the table."""

    def __init__(self, here: Setting, parameters: Iterable[shapes.Shape]) -> None:
        self.here = here
        loop = here.spec.train
        table = shapes.block_activations(here.spec.model, loop.micro_batch, loop.seq_len)
        self.numel = {shape.name: shape.numel for shape in table}
        self.parameters = {shape.name: shape.numel for shape in parameters}
        self.ops: list[Op] = []

    def bytes_of(self, name: str) -> int:
        return self.numel[name] * self.here.width

    def grads_of(self, prefix: str) -> int:
        return sum(n for name, n in self.parameters.items() if name.startswith(f"{prefix}.")) * self.here.width

    def add(self, output: str, inputs: tuple[str, ...], **rest: Any) -> None:
        """An operation named for its output; `rest` are the other fields of Op."""
        self.ops.append(Op(name=output, inputs=inputs, output=output, output_bytes=self.bytes_of(output), **rest))

    def linear(self, x: str, out: str, parameter: str, holds: tuple[str, ...] = ()) -> None:
        self.add(
            out,
            (x,),
            keeps=(x,),
            parameter_grad_bytes=self.grads_of(parameter),
            holds=holds,
        )

    def norm(self, x: str, out: str, parameter: str, rows: int) -> None:
        """layernorm keeps its input and two numbers a row; rmsnorm see `_composite_rms_norm`."""
        model, here = self.here.spec.model, self.here
        layernorm = model.norm == "layernorm" and not parameter.endswith(("q_norm", "k_norm"))
        if not layernorm and not here.on_cuda:
            return self._composite_rms_norm(x, out, parameter, rows)
        stat_width = FP32 if here.on_cuda else here.width
        return self.add(
            out,
            (x,),
            keeps=(x,),
            hidden_bytes=(2 if layernorm else 1) * rows * stat_width,
            parameter_grad_bytes=self.grads_of(parameter),
        )

    def _composite_rms_norm(self, x: str, out: str, parameter: str, rows: int) -> None:
        """On CPU rms_norm is a chain in fp32: it keeps the fp32 input (a copy in bf16), 1/rms and x/rms.

        At the peak of its backward five fp32 tensors of its size are alive, x/rms and the output's gradient are
        gone.
        """
        n, width = self.numel[out], self.here.width
        copy = 0 if width == FP32 else n * FP32
        self.add(
            out,
            (x,),
            keeps=(x,) if width == FP32 else (),
            hidden_bytes=copy + n * FP32 + rows * FP32,
            forward_scratch_bytes=0 if width == FP32 else n * FP32,
            backward_scratch_bytes=n * (4 * FP32 - width),
            parameter_grad_bytes=self.grads_of(parameter),
        )

    def rotate(self, x: str, out: str) -> None:
        """A complex product in fp32; keeps nothing but the angles, which all blocks share."""
        n, width = self.numel[out], self.here.width
        in_fp32 = 0 if width == FP32 else 2 * n * FP32
        angles = self.here.spec.train.seq_len * self.here.spec.model.head_dim * FP32
        self.add(
            out,
            (x,),
            forward_scratch_bytes=in_fp32,
            backward_scratch_bytes=n * width + angles + in_fp32,
        )

    def attention(self, q: str, k: str, v: str) -> None:
        if self.here.spec.model.attention == "math":
            return self._math_attention(q, k, v)
        lse = self.numel["attention_lse"] * FP32
        n = self.numel["attention"]
        # FlashAttention-2's backward adds up the queries' gradient in fp32 beside the row sums.
        scratch = n * FP32 + lse if self.here.on_cuda else 0
        grads = self.bytes_of(q) + self.bytes_of(k) + self.bytes_of(v)
        return self.add(
            "attention",
            (q, k, v),
            keeps=(q, k, v, "attention"),
            hidden_bytes=lse,
            backward_scratch_bytes=grads + scratch,
        )

    def _math_attention(self, q: str, k: str, v: str) -> None:
        """Keeps contiguous q, k and v for all heads, the probabilities and the mask; scores live to its end."""
        scores = self.numel["attention_scores"] * self.here.width
        heads = self.bytes_of("attention")
        mask = self.here.spec.train.seq_len**2
        self.add(
            "attention",
            (q, k, v),
            hidden_bytes=3 * heads + scores + mask,
            forward_scratch_bytes=2 * scores,
            forward_only_bytes=3 * scores + mask,
            backward_scratch_bytes=2 * scores + heads,
        )

    def residual(self, x: str, y: str, out: str) -> None:
        self.add(out, (x, y), passes_gradient=True)


def block_ops(here: Setting) -> tuple[Op, ...]:
    """One block, from `input` to `output`, in the order of train/model.py."""
    model = here.spec.model
    line = _Line(here, shapes.block_parameters(model))
    line.norm("input", "attention_norm", "attention_norm", here.tokens)
    for name in ("q", "k", "v"):
        line.linear("attention_norm", name, f"attention.{name}")
    q, k = "q", "k"
    if model.qk_norm:
        line.norm("q", "q_normed", "attention.q_norm", here.tokens * model.num_heads)
        line.norm("k", "k_normed", "attention.k_norm", here.tokens * model.num_kv_heads)
        q, k = "q_normed", "k_normed"
    if model.position == "rope":
        line.rotate(q, "q_rotated")
        line.rotate(k, "k_rotated")
        q, k = "q_rotated", "k_rotated"
    line.attention(q, k, "v")
    line.linear("attention", "o", "attention.o", holds=("attention_norm",))
    line.residual("input", "o", "attention_residual")
    line.norm("attention_residual", "mlp_norm", "mlp_norm", here.tokens)
    _mlp(line)
    line.residual("attention_residual", "mlp_down", "output")
    return tuple(line.ops)


def _mlp(line: _Line) -> None:
    if line.here.spec.model.mlp == "gelu":
        line.linear("mlp_norm", "mlp_up", "mlp.up")
        line.add("mlp_act", ("mlp_up",), keeps=("mlp_up",))
    else:
        line.linear("mlp_norm", "mlp_gate", "mlp.gate")
        line.add("mlp_silu", ("mlp_gate",), keeps=("mlp_gate",))
        line.linear("mlp_norm", "mlp_up", "mlp.up")
        line.add("mlp_act", ("mlp_silu", "mlp_up"), keeps=("mlp_silu", "mlp_up"))
    line.linear("mlp_act", "mlp_down", "mlp.down", holds=("mlp_norm",))


def last_norm_ops(here: Setting) -> tuple[Op, ...]:
    """The norm before the head, from `input` to `output`."""
    line = _Line(here, shapes.root_parameters(here.spec.model))
    line.norm("input", "output", "norm", here.tokens)
    return tuple(line.ops)
