"""What a training run is made of: frozen, strict records that `conf/` fills and the trainer reads.

Takes plain JSON (`TrainSpec.model_validate_json`), gives TrainSpec. It must not import torch.
Defaults live in `conf/`, never here. Checks across sections are in `problems`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Spec(BaseModel):
    """A frozen record that refuses unknown keys and never converts a value to another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelSpec(Spec):
    """Architecture of a decoder-only transformer; two families, by norm / mlp / position."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Readable name, used in run names; letters, digits, dot, dash, underscore."""
    num_layers: Count
    """Number of transformer blocks."""
    d_model: Count
    """Width of the residual stream."""
    num_heads: Count
    """Number of query heads."""
    num_kv_heads: Count
    """Number of key-value heads; divides num_heads (grouped-query attention when smaller)."""
    head_dim: Count
    """Width of one head; need not be d_model / num_heads."""
    d_mlp: Count
    """Inner width of the feed-forward layer."""
    vocab_size: Count
    """Rows of the embedding."""
    context_length: Count
    """Longest sequence the model is made for, tokens."""
    norm: Literal["layernorm", "rmsnorm"]
    """Normalisation; layernorm has a bias, rmsnorm has none."""
    mlp: Literal["gelu", "swiglu"]
    """Feed-forward layer; gelu has two matrices with biases, swiglu three without."""
    position: Literal["learned", "rope"]
    """Positions: a learned table, or rotary."""
    attention_bias: bool
    """Biases on the query, key, value and output projections."""
    tie_embeddings: bool
    """The head reuses the embedding's matrix."""
    qk_norm: bool
    """RMS norm of every query and key head."""
    attention: Literal["sdpa", "math"]
    """sdpa: torch's fused attention; math: score matrices kept in memory."""
    norm_eps: PositiveFloat
    """Epsilon of every norm."""
    rope_theta: PositiveFloat | None
    """Base of the rotary frequencies; null with learned positions."""


SavedName = Literal["attention", "q", "k", "v", "qkv", "o", "mlp_gate", "mlp_up", "mlp_down", "every_second_matmul"]
"""What a recomputing block may keep; train/shapes.py says which outputs each one stands for."""


class CkptSpec(Spec):
    """Activation checkpointing: which blocks recompute their activations in backward, and what those still keep."""

    policy: Literal["none", "full", "selective", "ops"]
    """none: keep all; full: every block recomputes; selective: some blocks do; ops: blocks recompute all but `save`."""
    every: Count | None
    """selective, ops: the blocks every, 2*every, ... counted from 1 recompute."""
    layers: tuple[NonNegativeInt, ...] | None
    """selective, ops: these blocks recompute, counted from 0; takes the place of every."""
    first: NonNegativeInt | None
    """selective, ops: the first n blocks recompute; takes the place of every."""
    last: NonNegativeInt | None
    """selective, ops: the last n blocks recompute; takes the place of every."""
    save: (
        Annotated[
            Annotated[SavedName, Tag("str")] | Annotated[tuple[SavedName, ...], Tag("tuple")],
            Discriminator(lambda value: "tuple" if isinstance(value, list | tuple) else "str"),
        ]
        | None
    )
    """ops: the output or outputs that a recomputing block keeps, by name."""

    def layers_recomputed(self, num_layers: int) -> tuple[int, ...]:
        """Indices, from 0, of the blocks that recompute; under ops all but what they keep."""
        if self.policy == "none":
            return ()
        if self.policy == "full":
            return tuple(range(num_layers))
        if self.layers is not None:
            return tuple(sorted(set(self.layers)))
        if self.first is not None:
            return tuple(range(min(self.first, num_layers)))
        if self.last is not None:
            return tuple(range(max(0, num_layers - self.last), num_layers))
        every = self.every or 1
        return tuple(i for i in range(num_layers) if (i + 1) % every == 0)


class EvalSpec(Spec):
    """Evaluation on the held-out part of the data."""

    every_steps: Count
    """Optimizer steps between evaluations; there is always one at the end."""
    sequences: Count
    """How many held-out sequences; fewer where the held-out part is shorter."""


class LoopSpec(Spec):
    """One optimizer step: how many tokens and in what precision."""

    micro_batch: Count
    """Sequences a rank holds in one forward pass."""
    grad_accum: Count
    """Forward and backward passes per optimizer step."""
    seq_len: Count
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16_mixed", "bf16"]
    """fp32; bf16_mixed: bf16 compute, fp32 parameters and reductions; bf16: all bf16."""
    loss: Literal["full", "chunked"]
    """full: all logits at once; chunked: never all logits at once."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Share of the numbers written to the residual stream that training leaves out."""
    compile: bool
    """torch.compile of every block."""
    seed: NonNegativeInt
    """Seed of initial weights and of data order."""
    eval: EvalSpec


class OptimSpec(Spec):
    """AdamW, its schedule, and gradient clipping."""

    impl: Literal["fused", "foreach", "forloop"]
    """Implementation of AdamW; foreach keeps about one more copy of the parameters for a moment."""
    lr: PositiveFloat
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    """Decoupled weight decay of matrices; vectors have none."""
    schedule: Literal["cosine", "constant"]
    """cosine: down to min_lr_fraction at decay_steps; constant after the warm-up."""
    warmup_steps: NonNegativeInt
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None
    """Length of the cosine, steps; null: the steps that the budget allows."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)]
    """Last learning rate of the cosine as a share of lr."""
    clip_norm: PositiveFloat | None
    """Largest norm of all gradients together; null: no clipping."""


class DataSpec(Spec):
    """Where the text comes from and how it becomes tokens."""

    source: Literal["stdlib", "text"]
    """stdlib: the running Python's own library; text: UTF-8 files or folders."""
    path: str | tuple[str, ...] | None
    """text: a file or folder, or a list of them."""
    tokenizer: str
    """bytes (vocabulary 256), or the path of a Hugging Face tokenizer.json."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)]
    """Share of the tokens held out for evaluation."""


class BudgetSpec(Spec):
    """Limits that a run may not pass; whichever comes first ends it."""

    max_steps: Count | None
    """Optimizer steps."""
    max_tokens: Count | None
    """Training tokens over all ranks."""
    max_wall_time_s: PositiveFloat | None
    """Seconds of training over all attempts; start-up and the last evaluation and checkpoint come on top."""
    max_device_hours: PositiveFloat | None
    """Hours times devices over all attempts."""
    max_device_memory_fraction: Fraction
    """Share of the device's usable bytes that the run may plan for."""
    max_recompute_fraction: NonNegativeFloat | None
    """Most recomputed FLOPs as a share of the step's FLOPs without recomputation."""


class DeviceSpec(Spec):
    """One device as the estimate sees it; null: nobody measured it."""

    name: str
    """Readable name."""
    kind: Literal["auto", "cpu", "cuda"]
    """auto: whatever this machine has."""
    usable_bytes: Count | None
    """Bytes a process can really get; null on cpu and auto: read from the machine."""
    context_bytes: NonNegativeInt | None
    """CUDA context, or on cpu the resident set before the model is built."""
    nccl_bytes: NonNegativeInt | None
    """What NCCL takes once there is more than one rank."""
    workspace_bytes: NonNegativeInt | None
    """cuBLAS workspace kept through the allocator."""
    compute_capability: PositiveFloat | None
    """CUDA compute capability, major.minor; decides which attention kernels torch may take. Null on cpu."""
    peak_flops_fp32: PositiveFloat | None
    """Peak FLOP/s in fp32."""
    peak_flops_bf16: PositiveFloat | None
    """Peak FLOP/s in bf16 without sparsity."""
    sources: dict[str, str]
    """Where each number comes from."""


class ParallelSpec(Spec):
    """Ranks and how the parameters are split over them."""

    nodes: Count
    """Machines."""
    devices_per_node: Count
    """Ranks a machine, one device each."""
    shard: Literal["fsdp", "hsdp", "none"]
    """fsdp: over all ranks; hsdp: within a node, replicated across; none: replicated."""
    reshard_after_forward: Literal["default", "always", "never"]
    """default: blocks yes, root no (torch's own default)."""
    cpu_offload: bool
    """Parameters and optimizer states in host memory."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices_per_node


class CheckpointSpec(Spec):
    """Checkpoints on disk."""

    every_steps: Count
    """Optimizer steps between checkpoints; there is always one at the end."""
    keep: Count
    """How many of the newest complete checkpoints stay."""


class TrainSpec(Spec):
    """All that the trainer needs, and nothing of the launcher."""

    model: ModelSpec
    ckpt: CkptSpec
    train: LoopSpec
    optim: OptimSpec
    data: DataSpec
    budget: BudgetSpec
    device: DeviceSpec
    parallel: ParallelSpec
    checkpoint: CheckpointSpec

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.train.micro_batch * self.train.grad_accum * self.parallel.world_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.sequences_per_step * self.train.seq_len

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps that the budget's steps and tokens allow; None where neither is set."""
        limits = []
        if self.budget.max_steps is not None:
            limits.append(self.budget.max_steps)
        if self.budget.max_tokens is not None:
            limits.append(self.budget.max_tokens // self.tokens_per_step)
        return min(limits) if limits else None


class Problem(Spec):
    """One thing wrong with a config: the key as typed, its value, why, and what to set."""

    key: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.key}={self.value}: {self.why}. {self.fix}" if self.fix else f"{self.key}={self.value}: {self.why}."
        )


def as_typed(value: object) -> str:
    """A value as one types it behind `key=`: null, true, [a.txt,b/]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    return str(value)
