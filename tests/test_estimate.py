"""What must hold of the estimate for any shape: it grows with the work, shrinks with ranks and recomputation."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory.formula import estimate
from orchestrator.memory.saved import ledger
from orchestrator.memory.sizes import Sizes
from orchestrator.memory.step import moments, moments_of
from tests.specs import train_spec
from train.spec import CkptSpec, TrainSpec

BASES = {
    "gelu on cpu": train_spec("model=tiny", "device=cpu"),
    "llama in bf16 on a gpu": train_spec("model=llama3_2_1b", "device=h100_80gb", "train.precision=bf16_mixed"),
    "qwen, all bf16, on a gpu": train_spec("model=qwen3_0_6b", "device=a100_80gb", "train.precision=bf16"),
    "math attention on cpu": train_spec("model=small", "device=cpu", "model.attention=math"),
    "chunked on cpu": train_spec("model=tinyllama_1b", "device=cpu", "train.loss=chunked"),
}
NO_POLICY = CkptSpec(policy="none", every=None, layers=None, first=None, last=None, save=None)
FULL = NO_POLICY.model_copy(update={"policy": "full"})


def changed(spec: TrainSpec, section: str, **values: Any) -> TrainSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})


def peak(spec: TrainSpec) -> int:
    value = estimate(spec).peak_device_bytes
    assert value is not None
    return value


def held(spec: TrainSpec) -> int:
    """Bytes between forward and backward."""
    return sum(section.copies * section.size_bytes for section in ledger(spec))


@st.composite
def specs(draw: st.DrawFn) -> TrainSpec:
    """A random shape of one of the bases, with a random policy and number of ranks."""
    spec = BASES[draw(st.sampled_from(sorted(BASES)))]
    kv = draw(st.sampled_from([1, 2, 4])) if spec.model.attention == "sdpa" else 4
    spec = changed(
        spec,
        "model",
        num_layers=draw(st.integers(1, 30)),
        d_model=draw(st.integers(1, 40)) * 16,
        num_heads=4,
        num_kv_heads=kv,
        head_dim=draw(st.integers(1, 16)) * 8,
        d_mlp=draw(st.integers(1, 2000)),
        vocab_size=draw(st.integers(256, 50_000)),
    )
    spec = changed(
        spec,
        "train",
        micro_batch=draw(st.integers(1, 12)),
        seq_len=draw(st.integers(1, 600)),
        grad_accum=draw(st.sampled_from([1, 4])),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )
    spec = changed(spec, "optim", impl=draw(st.sampled_from(["fused", "foreach", "forloop"])))
    spec = changed(
        spec,
        "parallel",
        nodes=draw(st.integers(1, 3)),
        devices_per_node=draw(st.integers(1, 9)),
        shard=draw(st.sampled_from(["fsdp", "hsdp", "none"])),
        reshard_after_forward=draw(st.sampled_from(["default", "always", "never"])),
    )
    return spec.model_copy(update={"ckpt": draw(policies(spec.model.num_layers, spec.model.mlp == "swiglu"))})


@st.composite
def policies(draw: st.DrawFn, layers: int, gated: bool) -> CkptSpec:
    names = ["attention", "q", "k", "v", "qkv", "o", "mlp_up", "mlp_down", "every_second_matmul"]
    kind = draw(st.sampled_from(["none", "full", "selective", "ops"]))
    which: dict[str, Any] = {}
    if kind in ("selective", "ops"):
        which = draw(
            st.sampled_from(
                [
                    {"every": draw(st.integers(1, layers))},
                    {"first": draw(st.integers(0, layers))},
                    {"last": draw(st.integers(0, layers))},
                    {"layers": tuple(draw(st.sets(st.integers(0, layers - 1))))},
                ]
            )
        )
    if kind == "ops":
        which["save"] = tuple(draw(st.sets(st.sampled_from([*names, "mlp_gate"] if gated else names), min_size=1)))
    return NO_POLICY.model_copy(update={"policy": kind, **which})


@settings(max_examples=150, deadline=None)
@given(specs(), st.sampled_from(["micro_batch", "seq_len", "num_layers"]))
def test_the_peak_never_falls_with_more_work(spec: TrainSpec, key: str) -> None:
    section = "model" if key == "num_layers" else "train"
    more = changed(spec, section, **{key: getattr(getattr(spec, section), key) + 1})
    assert peak(more) >= peak(spec)


def test_a_tensor_that_outgrows_a_shared_segment_does_not_lower_the_peak() -> None:
    spec = changed(BASES["llama in bf16 on a gpu"], "model", num_layers=1, d_model=16, num_heads=4, num_kv_heads=1)
    spec = changed(changed(spec, "model", head_dim=8, d_mlp=1, vocab_size=4338), "train", micro_batch=8, seq_len=75)
    assert peak(changed(spec, "train", micro_batch=9)) >= peak(spec)


@settings(max_examples=150, deadline=None)
@given(specs())
def test_full_holds_no_more_than_selective_and_selective_no_more_than_none(spec: TrainSpec) -> None:
    none, full = (spec.model_copy(update={"ckpt": ckpt}) for ckpt in (NO_POLICY, FULL))
    again = 5056 * spec.model.num_layers  # the state of the random numbers of each region
    assert held(full) <= held(spec) + again
    if spec.ckpt.policy != "ops":  # which may keep what backward has no use for, as mlp_down
        assert held(spec) <= held(none) + again


@settings(max_examples=150, deadline=None)
@given(specs(), st.integers(1, 40))
def test_more_ranks_never_cost_more_bytes_of_parameters(spec: TrainSpec, more: int) -> None:
    spec = changed(spec, "parallel", shard="fsdp")
    wider = changed(spec, "parallel", devices_per_node=spec.parallel.devices_per_node + more)
    few, many = Sizes(spec).states, Sizes(wider).states
    assert many.parameter_bytes <= few.parameter_bytes
    assert many.optimizer_bytes <= few.optimizer_bytes


@settings(max_examples=150, deadline=None)
@given(specs())
def test_terms_add_up_and_allocated_is_no_more_than_reserved(spec: TrainSpec) -> None:
    found = estimate(spec)
    assert sum(value or 0 for value in found.terms.values()) == found.peak_device_bytes
    assert found.peak_allocated_bytes is not None
    assert found.peak_reserved_bytes is not None
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes


@settings(max_examples=200, deadline=None)
@given(specs())
def test_the_layers_looked_at_are_those_of_the_peak(spec: TrainSpec) -> None:
    sizes = Sizes(spec)
    few, every = moments_of(sizes, sizes.layers_that_matter()), moments(spec)
    for what in ("total_bytes", "main_stream_bytes", "gradients", "all_gather_buffers"):
        assert max(getattr(m, what) for m in few) == max(getattr(m, what) for m in every), what
    for phase in ("forward", "backward"):
        of_phase = [max(m.total_bytes for m in ms if m.phase == phase) for ms in (few, every)]
        assert of_phase[0] == of_phase[1], phase


@pytest.mark.parametrize("name", BASES)
def test_an_estimate_is_a_function_of_the_spec_alone(name: str) -> None:
    assert estimate(BASES[name]) == estimate(BASES[name])
