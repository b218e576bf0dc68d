"""Every check names the key as typed, its value, the reason, and what to set."""

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from tests.specs import train_spec
from train import checks
from train.checks import problems, unsupported
from train.spec import Problem, SavedName, Spec, TrainSpec

ROPE = ("model.position=rope", "model.rope_theta=10000.0")
CASES = [
    (
        ("model.num_heads=7",),
        "model.num_heads=7: 7 heads do not divide model.d_model=128. Set it to 4, 8, 16, 32, 64 or 128",
    ),
    (
        ("model.num_heads=7", "model.num_kv_heads=1", "model.d_model=6"),
        "model.num_heads=7: 7 heads do not divide model.d_model=6. Set it to 1, 2, 3 or 6",
    ),
    (
        ("model.num_kv_heads=3",),
        "model.num_kv_heads=3: 3 key-value heads cannot serve model.num_heads=4 evenly. Set it to 1, 2 or 4",
    ),
    (
        ("model.num_kv_heads=8",),
        "model.num_kv_heads=8: 8 key-value heads cannot serve model.num_heads=4 evenly. Set it to 1, 2 or 4",
    ),
    (
        ("model.position=rope",),
        "model.rope_theta=null: model.position=rope needs the base of its frequencies. "
        "Set it to a number, 10000.0 in the original",
    ),
    (
        (*ROPE, "model.head_dim=33"),
        "model.head_dim=33: model.position=rope turns pairs of numbers. Set it to an even number",
    ),
    (
        ("ckpt=selective", "ckpt.layers=[0,1]", "ckpt.first=2"),
        "ckpt.first=2: ckpt.layers=[0,1] names the blocks already. Set one of the two to null",
    ),
    (
        ("ckpt=selective", "ckpt.first=1", "ckpt.last=2"),
        "ckpt.last=2: ckpt.first=1 names the blocks already. Set one of the two to null",
    ),
    (
        ("ckpt=ops", "ckpt.layers=[0,1]", "ckpt.first=1", "ckpt.last=2"),
        "ckpt.first=1: ckpt.layers=[0,1] names the blocks already. Set two of layers, first and last to null",
    ),
    (
        ("ckpt=ops", "ckpt.last=5"),
        "ckpt.last=5: the model has only model.num_layers=4 blocks. Set it to at most 4",
    ),
    (
        ("ckpt=full", "ckpt.last=2"),
        "ckpt.last=2: it chooses blocks for ckpt=selective and ckpt=ops, and this run has ckpt=full. "
        "Set ckpt=selective or ckpt=ops, or leave it out (null)",
    ),
    (
        ("ckpt=selective", "ckpt.save=[attention,o]"),
        "ckpt.save=[attention,o]: it names what blocks keep under ckpt=ops, and this run has ckpt=selective. "
        "Set ckpt=ops, or leave it out (null)",
    ),
    (
        ("ckpt=ops", "ckpt.save=[]"),
        "ckpt.save=[]: ckpt=ops keeps the outputs that it names, and it names none. "
        "Name some, as in ckpt.save=[attention,qkv], or use ckpt=full",
    ),
    (
        ("ckpt=ops", "ckpt.save=null"),
        "ckpt.save=null: ckpt=ops keeps the outputs that it names, and it names none. "
        "Name some, as in ckpt.save=[attention,qkv], or use ckpt=full",
    ),
    (
        ("ckpt=ops", "ckpt.save=[q,mlp_gate]"),
        "ckpt.save=[q,mlp_gate]: model.mlp=gelu has no gate. Leave mlp_gate out; mlp_up is the product before the gelu",
    ),
    (
        ("ckpt=ops", "ckpt.save=atention"),
        "ckpt.save=atention: it is not one of the choices. Did you mean attention? "
        "Choices: attention, every_second_matmul, k, mlp_down, mlp_gate, mlp_up, o, q, qkv, v",
    ),
    (
        ("ckpt=ops", "ckpt.save=[q,mlp_upp]"),
        "ckpt.save=[q,mlp_upp]: mlp_upp is not one of the choices. Did you mean mlp_up? "
        "Choices: attention, every_second_matmul, k, mlp_down, mlp_gate, mlp_up, o, q, qkv, v",
    ),
    (
        ("ckpt=ops", "train.compile=true"),
        "train.compile=true: ckpt=ops saves by the names of a block's layers, and a compiled block has none left. "
        "Set it to false, or use ckpt=selective or ckpt=full",
    ),
    (
        ("train.dropout=1.0",),
        "train.dropout=1.0: it must be less than 1. Set it to a share from 0 to below 1",
    ),
    (
        ("ckpt=selective", "ckpt.layers=[0,4,9]"),
        "ckpt.layers=[0,4,9]: 4 or 9 is not a block of model.num_layers=4. Use numbers from 0 to 3",
    ),
    (
        ("ckpt=selective", "ckpt.first=5"),
        "ckpt.first=5: the model has only model.num_layers=4 blocks. Set it to at most 4",
    ),
    (
        ("ckpt=selective", "ckpt.every=5"),
        "ckpt.every=5: no block of model.num_layers=4 would recompute. "
        "Set it to a number from 1 to 4, or use ckpt=none",
    ),
    (
        ("ckpt=selective", "ckpt.every=null"),
        "ckpt.every=null: no block of model.num_layers=4 would recompute. "
        "Set it to a number from 1 to 4, or use ckpt=none",
    ),
    (
        ("train.seq_len=129",),
        "train.seq_len=129: the learned positions end at model.context_length=128. "
        "Set it to at most 128, or raise model.context_length",
    ),
    (
        ("budget.max_steps=null", "optim.schedule=constant"),
        "budget.max_steps=null: nothing would end this run. Set at least one of budget.max_steps, "
        "budget.max_tokens, budget.max_wall_time_s, budget.max_device_hours",
    ),
    (
        ("budget.max_steps=null", "budget.max_wall_time_s=60.0"),
        "optim.decay_steps=null: optim.schedule=cosine must know its length, and the budget names no steps or tokens. "
        "Set optim.decay_steps, budget.max_steps or budget.max_tokens, or optim.schedule=constant",
    ),
    (
        ("budget.max_tokens=1000", "train.grad_accum=2", "parallel=node_8"),
        "budget.max_tokens=1000: one optimizer step takes 8192 tokens. "
        "Set it to 8192 or more, or make the step smaller",
    ),
    (
        ("data=text",),
        "data.path=null: data=text reads files that you name. "
        "Set it to a UTF-8 file or folder, or to a list: data.path=[a.txt,b/]",
    ),
    (
        ("data=text", "data.path=[]"),
        "data.path=[]: data=text reads files that you name. "
        "Set it to a UTF-8 file or folder, or to a list: data.path=[a.txt,b/]",
    ),
    (
        ("model.vocab_size=255",),
        "model.vocab_size=255: data.tokenizer=bytes gives tokens from 0 to 255. Set it to 256 or more",
    ),
    (
        ("parallel.shard=hsdp",),
        "parallel.shard=hsdp: it replicates across nodes, and parallel.nodes=1. "
        "Set it to fsdp, or parallel.nodes to 2 or more",
    ),
    (
        ("parallel.cpu_offload=true", "device=cpu"),
        "parallel.cpu_offload=true: with device=cpu all is in host memory already. Set it to false",
    ),
]
UNSUPPORTED = [
    (("parallel.cpu_offload=true",), "parallel.cpu_offload=true: the trainer does not offload yet. Set it to false"),
]
GOOD = train_spec("model=tiny")


def sections(spec: TrainSpec) -> dict[str, Spec]:
    return {name: getattr(spec, name) for name in TrainSpec.model_fields}


def of(section: str, **changes: object) -> list[Problem]:
    """Problems of a good spec with changes in one section."""
    changed = getattr(GOOD, section).model_copy(update=changes)
    return problems(sections(GOOD) | {section: changed})


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=[message.partition(":")[0] for _, message in CASES])
def test_a_check_says_key_value_reason_and_fix(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$") as caught:
        train_spec("model=tiny", *overrides)
    (problem,) = caught.value.problems
    assert str(problem) == message


def test_every_name_alone_and_in_a_list_is_accepted_by_ops() -> None:
    swiglu = ("model=tiny", "model.mlp=swiglu", "ckpt=ops")
    for name in get_args(SavedName):
        assert train_spec(*swiglu, f"ckpt.save={name}").ckpt.save == name
        assert train_spec(*swiglu, f"ckpt.save=[{name},o]").ckpt.save == (name, "o")


@pytest.mark.parametrize(("overrides", "message"), UNSUPPORTED)
def test_what_the_trainer_does_not_carry_out_is_refused(overrides: tuple[str, ...], message: str) -> None:
    assert [str(problem) for problem in unsupported(train_spec("model=tiny", *overrides))] == [message]


def test_every_key_that_a_check_names_has_a_case() -> None:
    source = Path(checks.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r'_problem\(\s*"([a-z_.]+)"', source))
    assert named <= {message.partition("=")[0] for _, message in [*CASES, *UNSUPPORTED]}


def test_a_good_spec_has_no_problems() -> None:
    assert problems(sections(GOOD)) == []
    assert unsupported(GOOD) == []


def test_all_problems_are_found_together() -> None:
    changed = {
        "model": GOOD.model.model_copy(update={"num_heads": 7, "vocab_size": 100}),
        "train": GOOD.train.model_copy(update={"seq_len": 4096}),
        "parallel": GOOD.parallel.model_copy(update={"shard": "hsdp"}),
    }
    keys = {problem.key for problem in problems(sections(GOOD) | changed)}
    assert keys == {"model.num_heads", "model.vocab_size", "train.seq_len", "parallel.shard"}


@pytest.mark.parametrize("left_out", TrainSpec.model_fields)
def test_a_section_that_is_not_valid_by_itself_is_left_out(left_out: str) -> None:
    assert problems({name: value for name, value in sections(GOOD).items() if name != left_out}) == []


@given(st.integers(1, 64), st.integers(1, 20), st.integers(1, 20))
def test_heads_that_a_check_proposes_pass_it(d_model: int, num_heads: int, num_kv_heads: int) -> None:
    changes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    found = of("model", **changes)
    accepted = d_model % num_heads == 0 and num_heads % num_kv_heads == 0
    assert (not found) == accepted
    for problem in found:
        key = problem.key.partition(".")[2]
        for choice in map(int, re.findall(r"\d+", problem.fix)):
            assert key not in {p.key.partition(".")[2] for p in of("model", **changes | {key: choice})}


@given(
    st.integers(1, 12),
    st.none() | st.integers(1, 20),
    st.none() | st.lists(st.integers(0, 20), max_size=4).map(tuple),
    st.none() | st.integers(0, 20),
    st.none() | st.integers(0, 20),
)
def test_a_selective_policy_that_passes_names_blocks_of_the_model(
    num_layers: int, every: int | None, layers: tuple[int, ...] | None, first: int | None, last: int | None
) -> None:
    changes = {"policy": "selective", "every": every, "layers": layers, "first": first, "last": last}
    ckpt = GOOD.ckpt.model_copy(update=changes)
    model = GOOD.model.model_copy(update={"num_layers": num_layers})
    if not problems(sections(GOOD) | {"ckpt": ckpt, "model": model}):
        chosen = ckpt.layers_recomputed(num_layers)
        assert set(chosen) <= set(range(num_layers))
        assert list(chosen) == sorted(set(chosen))
        if layers is not None:
            assert set(chosen) == set(layers)
        elif first is not None:
            assert chosen == tuple(range(first))
        elif last is not None:
            assert chosen == tuple(range(num_layers))[num_layers - last :]
        else:
            assert chosen


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 100_000))
def test_a_budget_of_tokens_that_passes_allows_a_step(
    micro_batch: int, grad_accum: int, devices: int, max_tokens: int
) -> None:
    changed: dict[str, Spec] = {
        "train": GOOD.train.model_copy(update={"micro_batch": micro_batch, "grad_accum": grad_accum}),
        "parallel": GOOD.parallel.model_copy(update={"devices_per_node": devices}),
        "budget": GOOD.budget.model_copy(update={"max_tokens": max_tokens}),
    }
    spec = GOOD.model_copy(update=changed)
    found = problems(sections(spec))
    assert (not found) == (spec.planned_steps is not None and spec.planned_steps >= 1)
