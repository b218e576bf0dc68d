"""The ledger of saved tensors, byte for byte against the storages that are alive after a real forward pass."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.memory.formula import estimate
from orchestrator.memory.saved import Section, ledger
from orchestrator.memory.sizes import RNG_STATE_BYTES
from tests.live_bytes import LiveBytes
from tests.small_run import one_rank
from tests.specs import train_spec
from train import shapes
from train.activation import apply_checkpointing
from train.loss import batch_loss
from train.model import Transformer, build
from train.spec import TrainSpec

GELU = ("model=tiny", "model.num_layers=3", "device=cpu", "train.micro_batch=2", "train.seq_len=48")
LLAMA = (
    *("model=tinyllama_1b", "model.num_layers=3", "model.d_model=96", "model.num_heads=6", "model.num_kv_heads=2"),
    *("model.head_dim=32", "model.d_mlp=160", "model.vocab_size=500"),
    *("device=cpu", "train.micro_batch=2", "train.seq_len=48"),
)
QWEN = (
    *("model=qwen3_0_6b", "model.num_layers=3", "model.d_model=96", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.head_dim=32", "model.d_mlp=160", "model.vocab_size=500"),
    *("device=cpu", "train.micro_batch=3", "train.seq_len=32"),
)
FAMILIES = {"gelu": GELU, "llama": LLAMA, "qwen": QWEN}
PRECISIONS = {"fp32": "train.precision=fp32", "bf16": "train.precision=bf16"}
ATTENTION = {"sdpa": "model.attention=sdpa", "math": "model.attention=math"}
POLICIES = {
    "none": ("ckpt=none",),
    "full": ("ckpt=full",),
    "every second": ("ckpt=selective", "ckpt.every=2"),
    "layers": ("ckpt=selective", "ckpt.layers=[0,2]"),
    "first": ("ckpt=selective", "ckpt.first=1"),
    "last": ("ckpt=selective", "ckpt.last=2"),
    "attention": ("ckpt=ops", "ckpt.save=attention"),
    "every second matmul": ("ckpt=ops", "ckpt.save=every_second_matmul"),
    "all matmuls": ("ckpt=ops", "ckpt.save=[attention,qkv,o,mlp_up,mlp_down]"),
    "one block's qkv": ("ckpt=ops", "ckpt.save=qkv", "ckpt.first=1"),
}
OTHERS = {
    "dropout": (*GELU, "train.dropout=0.1"),
    "dropout full": (*LLAMA, "train.dropout=0.1", "ckpt=full"),
    "dropout ops": (*LLAMA, "train.dropout=0.1", "ckpt=ops"),
    "chunked": (*GELU, "train.loss=chunked"),
    "chunked untied bf16": (*LLAMA, "train.loss=chunked", "train.precision=bf16", "ckpt=full"),
}
# The loss, the sum of its weights, and what a scalar is multiplied with.
SCALAR_BYTES = 8


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


def real_module(spec: TrainSpec) -> Transformer:
    """The checkpointed module with numbers in it, and no FSDP."""
    module = build(spec.model, dropout=spec.train.dropout)
    apply_checkpointing(module, spec.ckpt)
    if spec.train.precision == "bf16":
        module.to(torch.bfloat16)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.1, 0.1)
    return module


def alive_after_forward(spec: TrainSpec) -> Counter[int]:
    """Sizes of all storages that a forward pass leaves alive, parameters left out."""
    module = real_module(spec)
    tokens = torch.randint(0, spec.model.vocab_size, (spec.train.micro_batch, spec.train.seq_len))
    targets = tokens.clone()
    live = LiveBytes()
    live.add(tokens)
    live.add(targets)
    with live:
        loss = batch_loss(spec.train, module, tokens, targets)
    assert loss.requires_grad
    return Counter(live.sizes(without=module.parameters()))


def predicted(sections: tuple[Section, ...]) -> Counter[int]:
    """Sizes of all entries of a ledger but the state of the random numbers, which no operation makes."""
    found: Counter[int] = Counter()
    for section in sections:
        for entry in section.entries:
            if entry.name != "rng_state":
                found[entry.size_bytes] += section.copies
    return found


def check(spec: TrainSpec) -> None:
    real, expected = alive_after_forward(spec), predicted(ledger(spec))
    for counted in (real, expected):
        for size in [size for size in counted if size <= SCALAR_BYTES]:
            del counted[size]
    assert real == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_the_ledger_says(family: str, precision: str, attention: str, policy: str) -> None:
    check(train_spec(*FAMILIES[family], PRECISIONS[precision], ATTENTION[attention], *POLICIES[policy]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_saved_with_dropout_or_a_chunked_loss_is_what_the_ledger_says(name: str) -> None:
    check(train_spec(*OTHERS[name]))


def test_a_region_that_recomputes_keeps_the_state_of_the_random_numbers() -> None:
    assert torch.get_rng_state().nbytes == RNG_STATE_BYTES
    (block,) = (s for s in ledger(train_spec(*GELU, "ckpt=full")) if s.name == "recomputed block")
    assert [(entry.name, entry.size_bytes) for entry in block.entries] == [
        ("input", 2 * 48 * 128 * 4),
        ("rng_state", RNG_STATE_BYTES),
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_flops_of_recomputation_are_those_counted(family: str, dropout: float, policy: str) -> None:
    # Plain attention: the counter knows its products, and takes the fused kernel of the CPU for nothing.
    spec = train_spec(*FAMILIES[family], ATTENTION["math"], *POLICIES[policy], f"train.dropout={dropout}")
    tokens = torch.zeros((spec.train.micro_batch, spec.train.seq_len), dtype=torch.int64)
    loss = batch_loss(spec.train, real_module(spec), tokens, tokens)
    with FlopCounterMode(display=False) as counted:
        loss.backward()
    step = shapes.step_flops(spec.model, spec.train.micro_batch, spec.train.seq_len)
    forward_and_backward = step * (1 + (estimate(spec).recompute_flops_fraction or 0.0))
    assert counted.get_total_flops() + step // 3 == pytest.approx(forward_and_backward, rel=1e-12)
