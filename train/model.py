"""Decoder-only transformers of both families, built from the table in train/shapes.py.

Takes a ModelSpec, gives a module from token ids (B, T) to logits (B, T, V), or with targets to their loss. Made on
the meta device; `initialise` fills the shards of any number of ranks with the same weights.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from train import shapes
from train.loss import chunked_cross_entropy
from train.spec import ModelSpec

_INIT_STD = 0.02
_ROWS_A_SEED = 64


class _Table:
    """Builds layers from named shapes, so that the module cannot differ from the table."""

    def __init__(self, model: ModelSpec, table: tuple[shapes.Shape, ...]) -> None:
        self.model = model
        self.dims = {shape.name: shape.dims for shape in table}

    def linear(self, name: str) -> nn.Linear:
        d_out, d_in = self.dims[f"{name}.weight"]
        return nn.Linear(d_in, d_out, bias=f"{name}.bias" in self.dims)

    def embedding(self, name: str) -> nn.Embedding:
        rows, width = self.dims[f"{name}.weight"]
        return nn.Embedding(rows, width)

    def norm(self, name: str) -> nn.Module:
        (width,) = self.dims[f"{name}.weight"]
        if f"{name}.bias" in self.dims:
            return nn.LayerNorm(width, eps=self.model.norm_eps)
        return nn.RMSNorm(width, eps=self.model.norm_eps)


def rope_angles(model: ModelSpec, seq_len: int, device: torch.device) -> Tensor:
    """Unit complex numbers (T, D/2) by which pairs of a head's numbers turn; complex64.

    Complex, so that FSDP's mixed precision does not cast them to bf16.
    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.
    """
    assert model.rope_theta is not None
    exponents = torch.arange(0, model.head_dim, 2, device=device, dtype=torch.float32) / model.head_dim
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, model.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x (B, T, H, D) with neighbouring pairs turned by rope (T, D/2); same dtype as x."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).type_as(x)


class FusedAttention(nn.Module):
    """Causal attention of q (B, H, T, D) over k and v by torch's own kernel; without parameters."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


class MathAttention(nn.Module):
    """The same in single operations, which keep the score matrices (B, H, T, T); without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.product = _Product()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)  # (B, H, T, T)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        probs = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        return self.product(probs, v)  # type: ignore[no-any-return]


class _Product(nn.Module):
    """a @ b as a submodule, so that the one product of several can be named."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, model: ModelSpec, table: _Table) -> None:
        super().__init__()
        self.model = model
        self.q = table.linear("attention.q")
        self.k = table.linear("attention.k")
        self.v = table.linear("attention.v")
        self.o = table.linear("attention.o")
        if model.qk_norm:
            self.q_norm = table.norm("attention.q_norm")
            self.k_norm = table.norm("attention.k_norm")
        self.attend = MathAttention() if model.attention == "math" else FusedAttention()

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        heads, kv_heads, width = self.model.num_heads, self.model.num_kv_heads, self.model.head_dim
        q = self.q(x).unflatten(-1, (heads, width))  # (B, T, H, D)
        k = self.k(x).unflatten(-1, (kv_heads, width))
        v = self.v(x).unflatten(-1, (kv_heads, width))
        if self.model.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class GeluMlp(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, table: _Table) -> None:
        super().__init__()
        self.up = table.linear("mlp.up")
        self.down = table.linear("mlp.down")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, table: _Table) -> None:
        super().__init__()
        self.gate = table.linear("mlp.gate")
        self.up = table.linear("mlp.up")
        self.down = table.linear("mlp.down")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm transformer block; `dropout` is the share left out of what it adds to the residual stream."""

    def __init__(self, model: ModelSpec, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        table = _Table(model, shapes.block_parameters(model))
        self.attention_norm = table.norm("attention_norm")
        self.attention = Attention(model, table)
        self.mlp_norm = table.norm("mlp_norm")
        self.mlp = GeluMlp(table) if model.mlp == "gelu" else SwigluMlp(table)

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        x = x + _dropped(self, self.attention(self.attention_norm(x), rope))
        return x + _dropped(self, self.mlp(self.mlp_norm(x)))

    def makers(self) -> dict[str, nn.Module]:
        """The submodule whose last operation makes each output that ckpt.save can choose, under its name there."""
        attend = self.attention.attend
        found: dict[str, nn.Module] = {"attention": attend.product if isinstance(attend, MathAttention) else attend}
        for name in ("q", "k", "v", "o"):
            found[name] = getattr(self.attention, name)
        for name, layer in self.mlp.named_children():
            found[f"mlp_{name}"] = layer
        return found


def _dropped(module: "Block | Transformer", x: Tensor) -> Tensor:
    """Dropout where there is any; without it no operation."""
    return F.dropout(x, module.dropout, module.training) if module.dropout else x


class Transformer(nn.Module):
    """Token ids (B, T) to logits (B, T, V), or with targets (B, T) to the mean loss, nats per token.

    The loss is the chunked one, which must run in here: only inside the root's forward are its weights gathered.
    """

    def __init__(self, model: ModelSpec, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.dropout = dropout
        table = _Table(model, shapes.root_parameters(model))
        self.embedding = table.embedding("embedding")
        self.positions = table.embedding("positions") if model.position == "learned" else None
        self.blocks = nn.ModuleList(Block(model, dropout=dropout) for _ in range(model.num_layers))
        self.norm = table.norm("norm")
        self.head = None if model.tie_embeddings else table.linear("head")
        self._rope: Tensor | None = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)  # (B, T, d)
        rope = None
        if self.positions is None:
            rope = self._rope_for(tokens)
        else:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = _dropped(self, x)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        if targets is not None:
            weight = self.embedding.weight if self.head is None else self.head.weight
            return chunked_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
        # A tied head uses the embedding's matrix in place: a second Parameter would not survive to_empty.
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _rope_for(self, tokens: Tensor) -> Tensor:
        if self._rope is None or self._rope.shape[0] != tokens.shape[1] or self._rope.device != tokens.device:
            self._rope = rope_angles(self.model, tokens.shape[1], tokens.device)
        return self._rope


def build(model: ModelSpec, *, dropout: float = 0.0) -> Transformer:
    """The module on the meta device: shapes, no memory."""
    with torch.device("meta"):
        return Transformer(model, dropout=dropout)


def initialise(module: Transformer, seed: int) -> None:
    """Fill all parameters in place; shards of DTensors get the rows that one rank alone would have there.

    Matrices are normal with deviation 0.02, those that write to the residual stream divided by
    sqrt(2 * num_layers) (Radford et al. 2019, GPT-2, section 2.3); norms are one, biases zero. Every 64 rows of a
    matrix have a seed of their own, made from `seed`, the name and the row, so the weights do not depend on
    the number of ranks.
    """
    residual_std = _INIT_STD / math.sqrt(2 * module.model.num_layers)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.dim() == 2:
                std = residual_std if name.endswith(("attention.o.weight", "mlp.down.weight")) else _INIT_STD
                _fill_normal(local, _first_row(parameter), std, f"{seed}/{name}")
            else:
                local.fill_(0.0 if name.endswith("bias") else 1.0)


def _first_row(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 0
    for mesh_dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            ranks = parameter.device_mesh.size(mesh_dim)
            rows_a_rank = -(-parameter.shape[0] // ranks)
            return int(parameter.device_mesh.get_local_rank(mesh_dim) * rows_a_rank)
    return 0


def _fill_normal(local: Tensor, first_row: int, std: float, key: str) -> None:
    for begin, end, seed in _seeded_rows(first_row, first_row + local.shape[0], key):
        generator = torch.Generator(device=local.device).manual_seed(seed)
        chunk_start = begin - begin % _ROWS_A_SEED
        rows = torch.empty(_ROWS_A_SEED, local.shape[1], device=local.device, dtype=torch.float32)
        rows.normal_(0.0, std, generator=generator)
        local[begin - first_row : end - first_row] = rows[begin - chunk_start : end - chunk_start]


def _seeded_rows(begin: int, end: int, key: str) -> Iterator[tuple[int, int, int]]:
    while begin < end:
        chunk = begin // _ROWS_A_SEED
        stop = min(end, (chunk + 1) * _ROWS_A_SEED)
        digest = hashlib.sha256(f"{key}/{chunk}".encode()).digest()
        yield begin, stop, int.from_bytes(digest[:8], "big") >> 1
        begin = stop


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """No gradients and evaluation behaviour inside, what it was before outside."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
