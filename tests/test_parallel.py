"""Many ranks train as one does, whatever the sharding; each holds its rows only."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.small_run import log, losses, on_ranks, one_rank, small_spec, train_here, train_ranks
from train import shapes
from train.loss import cross_entropy
from train.parallel import build_sharded
from train.spec import TrainSpec

CPU = torch.device("cpu")
STEPS = 20
ODD = ("model.vocab_size=301", "model.qk_norm=true", "model.head_dim=2", "model.d_mlp=131")
"""Sizes that two and three ranks cannot share evenly; of the two rows of a head's norm a third rank has none."""
WIDE = ("model.d_model=128", "model.d_mlp=512")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank, eight sequences a step."""
    folder = tmp_path_factory.mktemp("one")
    train_here(small_spec(folder, "train.micro_batch=8", f"budget.max_steps={STEPS}"), folder / "run")
    return losses(folder / "run")


def ranks(nodes: int, devices: int, shard: str) -> tuple[str, ...]:
    return f"parallel.nodes={nodes}", f"parallel.devices_per_node={devices}", f"parallel.shard={shard}"


# The same training.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "micro_batch"),
    [
        (ranks(1, 2, "fsdp"), 4),
        (ranks(1, 2, "none"), 4),
        (ranks(2, 1, "fsdp"), 4),
        (ranks(2, 1, "hsdp"), 4),
        (ranks(2, 2, "hsdp"), 2),
    ],
    ids=lambda value: " ".join(v.partition(".")[2] for v in value) if isinstance(value, tuple) else str(value),
)
def test_ranks_lose_what_one_rank_loses_at_the_same_global_batch(
    plan: tuple[str, ...], micro_batch: int, one: list[float], tmp_path: Path
) -> None:
    spec = small_spec(tmp_path, *plan, f"train.micro_batch={micro_batch}", f"budget.max_steps={STEPS}")
    assert train_ranks(spec, tmp_path / "run") == [0] * spec.parallel.world_size, log(tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["always", "never"])
def test_resharding_after_forward_does_not_change_the_losses(reshard: str, one: list[float], tmp_path: Path) -> None:
    overrides = ("train.micro_batch=4", f"parallel.reshard_after_forward={reshard}", "budget.max_steps=6")
    train_ranks(small_spec(tmp_path, *ranks(1, 2, "fsdp"), *overrides), tmp_path / "run")
    # The schedule is shorter, so only the steps before the cosine are the same.
    assert losses(tmp_path / "run")[:3] == pytest.approx(one[:3], abs=1e-4)


# The same weights at the start, and what each rank holds of them.


def _description(spec: TrainSpec) -> dict[str, object]:
    """Fingerprint of the gathered weights, and the bytes of this rank."""
    digest, local_bytes = hashlib.sha256(), 0
    for name, parameter in build_sharded(spec, CPU).named_parameters():
        assert isinstance(parameter, DTensor)
        digest.update(name.encode() + bytes(parameter.full_tensor().detach().flatten().view(torch.uint8).tolist()))
        local_bytes += parameter.to_local().nbytes
    return {"weights": digest.hexdigest(), "bytes": local_bytes}


def _describe(spec_json: str, file: str) -> None:
    dist.init_process_group("gloo")
    record = _description(TrainSpec.model_validate_json(spec_json))
    Path(f"{file}.{dist.get_rank()}").write_text(json.dumps(record), encoding="utf-8")
    dist.destroy_process_group()


def described(spec: TrainSpec, folder: Path) -> list[dict[str, object]]:
    world = spec.parallel.world_size
    folder.mkdir()
    assert on_ranks(world, folder, _describe, spec.model_dump_json(), str(folder / "rank")) == [0] * world, log(folder)
    return [json.loads((folder / f"rank.{rank}").read_text(encoding="utf-8")) for rank in range(world)]


def rows_of_rank(rows: int, ranks: int, rank: int) -> int:
    """torch.chunk: ceil(rows / ranks) each, the last ones get what is left."""
    chunk = -(-rows // ranks)
    return max(0, min(chunk, rows - rank * chunk))


def sharded_bytes(spec: TrainSpec, ranks: int, rank: int) -> int:
    return sum(4 * s.numel // s.dims[0] * rows_of_rank(s.dims[0], ranks, rank) for s in shapes.parameters(spec.model))


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    plans = {"two": ranks(1, 2, "fsdp"), "three": ranks(1, 3, "fsdp"), "hsdp": ranks(2, 2, "hsdp")}
    found = [
        rank["weights"]
        for name, plan in plans.items()
        for rank in described(small_spec(tmp_path, *plan, *ODD), tmp_path / name)
    ]
    assert set(found) == {_description(small_spec(tmp_path, *ODD))["weights"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "shards"),
    [(ranks(1, 3, "fsdp"), 3), (ranks(1, 2, "none"), 1), (ranks(2, 2, "hsdp"), 2)],
    ids=["fsdp", "none", "hsdp"],
)
def test_a_rank_holds_its_rows_of_every_parameter_and_no_others(
    plan: tuple[str, ...], shards: int, tmp_path: Path
) -> None:
    spec = small_spec(tmp_path, *plan, *ODD)
    held = [rank["bytes"] for rank in described(spec, tmp_path / "run")]
    assert held == [sharded_bytes(spec, shards, rank % shards) for rank in range(spec.parallel.world_size)]


def test_another_seed_gives_other_weights_and_the_same_seed_the_same(tmp_path: Path) -> None:
    first, again, other = (
        next(build_sharded(small_spec(tmp_path, f"train.seed={seed}"), CPU).parameters()).full_tensor()
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_matrices_start_with_the_deviations_of_gpt2(tmp_path: Path) -> None:
    module = build_sharded(small_spec(tmp_path, *WIDE), CPU)
    deviations = {name: p.full_tensor().std().item() for name, p in module.named_parameters() if p.dim() == 2}
    for name, deviation in deviations.items():
        residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
        assert deviation == pytest.approx(0.02 / 2 if residual else 0.02, rel=0.05), name


def test_norms_start_as_identities_and_biases_as_zeros(tmp_path: Path) -> None:
    module = build_sharded(small_spec(tmp_path), CPU)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            assert set(parameter.full_tensor().tolist()) == {0.0 if name.endswith("bias") else 1.0}, name


# Precision.


@pytest.mark.parametrize(
    ("precision", "parameters", "logits"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16_mixed", torch.float32, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_names_the_dtype_of_parameters_gradients_and_compute(
    precision: str, parameters: torch.dtype, logits: torch.dtype, tmp_path: Path
) -> None:
    module = build_sharded(small_spec(tmp_path, f"train.precision={precision}"), CPU)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    given = module(tokens)
    loss = cross_entropy(given, tokens)
    loss.backward()
    assert {p.dtype for p in module.parameters()} == {parameters}
    assert {p.grad.dtype for p in module.parameters()} == {parameters}
    assert given.dtype == logits
    assert loss.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "family"),
    [("bf16_mixed", ("model.position=rope", "model.rope_theta=10000.0", "model.norm=rmsnorm")), ("bf16", ())],
    ids=["bf16_mixed", "bf16"],
)
def test_bf16_trains_on_two_ranks(precision: str, family: tuple[str, ...], one: list[float], tmp_path: Path) -> None:
    overrides = (f"train.precision={precision}", "train.micro_batch=4", f"budget.max_steps={STEPS}", *family)
    assert train_ranks(small_spec(tmp_path, *ranks(1, 2, "fsdp"), *overrides), tmp_path / "run") == [0, 0]
    found = losses(tmp_path / "run")
    assert found[-1] == pytest.approx(one[-1], abs=0.1)
    assert found[-1] < found[0] - 0.5


@pytest.mark.slow
def test_compiled_and_checkpointed_blocks_lose_what_plain_ones_lose(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    sizes = ("model.num_layers=1", "budget.max_steps=3")
    train_here(small_spec(tmp_path, *sizes), tmp_path / "plain")
    train_here(small_spec(tmp_path, *sizes, "train.compile=true", "ckpt=full"), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)
