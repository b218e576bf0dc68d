"""Parameters, gradients and optimizer states of rank 0, byte for byte against real fully_shard and AdamW."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.memory.sizes import Sizes
from tests.small_run import on_ranks
from tests.specs import train_spec
from train.loss import batch_loss
from train.optim import build_optimizer
from train.parallel import build_sharded
from train.spec import TrainSpec

# Rows that no number of ranks divides, and a head of two numbers, fewer than the ranks.
ODD = (
    *("model=qwen3_0_6b", "model.num_layers=2", "model.d_model=15", "model.num_heads=5", "model.num_kv_heads=5"),
    *("model.head_dim=2", "model.d_mlp=37", "model.vocab_size=257", "data.tokenizer=bytes"),
    *("device=cpu", "train.micro_batch=1", "train.seq_len=8"),
)
GELU = ("model=tiny", "model.num_layers=2", "device=cpu", "train.micro_batch=1", "train.seq_len=8")
CASES = {
    "gelu": GELU,
    "odd": ODD,
    "odd, untied": (*ODD, "model.tie_embeddings=false", "model.qk_norm=false"),
    "odd, all in bf16": (*ODD, "train.precision=bf16"),
    "odd, in mixed precision": (*ODD, "train.precision=bf16_mixed", "optim.impl=foreach"),
    "one by one": (*GELU, "optim.impl=forloop"),
}


def _measure(specs: list[TrainSpec], out: str) -> None:
    dist.init_process_group("gloo")
    found = [_real_bytes(spec) for spec in specs]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _real_bytes(spec: TrainSpec) -> dict[str, int]:
    """Storages of this rank after one step, each once."""
    module = build_sharded(spec, torch.device("cpu"))
    optimizer = build_optimizer(module, spec.optim)
    tokens = torch.zeros((spec.train.micro_batch, spec.train.seq_len), dtype=torch.int64)
    batch_loss(spec.train, module, tokens, tokens).backward()
    parameters = list(module.parameters())
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer_states": _storage_bytes(states),
    }


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_states_are_those_of_a_real_rank(world: int, tmp_path: Path) -> None:
    specs = [train_spec(*case, f"parallel.devices_per_node={world}") for case in CASES.values()]
    out = tmp_path / "bytes.json"
    assert on_ranks(world, tmp_path, _measure, specs, str(out)) == [0] * world
    for name, spec, real in zip(CASES, specs, json.loads(out.read_text(encoding="utf-8")), strict=True):
        states = Sizes(spec).states
        predicted = {
            "parameters": states.parameter_bytes,
            "gradients": states.gradient_bytes,
            "optimizer_states": states.optimizer_bytes,
        }
        assert predicted == real, name


@pytest.mark.slow
def test_hsdp_shards_within_a_node_and_none_not_at_all(tmp_path: Path) -> None:
    ranks = ("parallel.nodes=2", "parallel.devices_per_node=2")
    specs = [train_spec(*ODD, *ranks, f"parallel.shard={shard}") for shard in ("hsdp", "none", "fsdp")]
    out = tmp_path / "bytes.json"
    assert on_ranks(4, tmp_path, _measure, specs, str(out)) == [0] * 4
    for spec, real in zip(specs, json.loads(out.read_text(encoding="utf-8")), strict=True):
        states = Sizes(spec).states
        assert (states.parameter_bytes, states.optimizer_bytes) == (real["parameters"], real["optimizer_states"])
