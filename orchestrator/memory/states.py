"""Bytes that do not depend on the batch: parameters, gradients, optimizer states, and FSDP's buffers.

Takes a TrainSpec, gives bytes of one rank. Sources: torch/distributed/fsdp/_fully_shard (_fsdp_param.py pads dim 0 to
a multiple of the ranks; _fsdp_collectives.py makes the buffers), torch/optim/adamw.py.
"""

from dataclasses import dataclass

from orchestrator.memory.block import FP32, Setting
from train import shapes
from train.spec import ParallelSpec


@dataclass(frozen=True, kw_only=True)
class Group:
    """One FSDP group, a block or the root: its parameters in the ways a rank holds them, bytes."""

    tensors: int
    """Number of parameters."""
    sharded_bytes: int
    """The rank's rows, padded; as many bytes as each of AdamW's two moments."""
    gradient_bytes: int
    """Gradients of these rows: views of one buffer."""
    unsharded_bytes: int
    """All rows in the compute precision, padded, parameter by parameter; also their gradients."""
    gathered_bytes: int
    """Output of the all-gather, in one piece."""
    gather_input_bytes: int
    """The rank's rows, cast for the all-gather; rows in the compute precision are sent as they are."""
    reduce_bytes: int
    """All gradients in the precision of the reduction, padded: the reduce-scatter's input."""
    largest_shard_bytes: int
    """The rank's rows of the largest parameter."""


@dataclass(frozen=True, kw_only=True)
class States:
    """What one rank holds of model and optimizer, bytes."""

    block: Group
    root: Group
    parameter_bytes: int
    """All shards."""
    gradient_bytes: int
    """Gradients of all shards."""
    optimizer_bytes: int
    """AdamW's two moments and step counts."""
    optimizer_step_scratch_bytes: int
    """Alive for a moment in optimizer.step()."""
    largest_shard_bytes: int
    """The largest single shard."""


def shard_ranks(parallel: ParallelSpec) -> int:
    """Over how many ranks the rows of a parameter are spread: all, one node's under hsdp, one under none."""
    return {"fsdp": parallel.world_size, "hsdp": parallel.devices_per_node, "none": 1}[parallel.shard]


def states(here: Setting) -> States:
    """Bytes of rank 0, which holds most."""
    spec = here.spec
    block = _group(here, shapes.block_parameters(spec.model))
    root = _group(here, shapes.root_parameters(spec.model))
    layers = spec.model.num_layers
    parameter_bytes = root.sharded_bytes + layers * block.sharded_bytes
    # A step count is one fp32 number a parameter; on CUDA it is on the device with the fused kernel only.
    counts = here.size(FP32) * (root.tensors + layers * block.tensors)
    largest = max(block.largest_shard_bytes, root.largest_shard_bytes)
    return States(
        block=block,
        root=root,
        parameter_bytes=parameter_bytes,
        gradient_bytes=root.gradient_bytes + layers * block.gradient_bytes,
        optimizer_bytes=2 * parameter_bytes + (counts if not here.on_cuda or spec.optim.impl == "fused" else 0),
        optimizer_step_scratch_bytes=_step_scratch(spec.optim.impl, parameter_bytes, largest),
        largest_shard_bytes=largest,
    )


def _group(here: Setting, parameters: tuple[shapes.Shape, ...]) -> Group:
    ranks, mixed = shard_ranks(here.spec.parallel), here.spec.train.precision == "bf16_mixed"
    stored, computed = FP32 if mixed else here.width, here.width
    rows = [-(-s.dims[0] // ranks) * (s.numel // s.dims[0]) for s in parameters]
    numel = sum(rows)
    size = here.size
    return Group(
        tensors=len(rows),
        sharded_bytes=sum(size(n * stored) for n in rows),
        gradient_bytes=size(numel * stored),
        unsharded_bytes=sum(size(n * ranks * computed) for n in rows),
        gathered_bytes=size(numel * ranks * computed) if ranks > 1 else 0,
        gather_input_bytes=size(numel * computed) if ranks > 1 and mixed else 0,
        reduce_bytes=size(numel * ranks * stored),
        largest_shard_bytes=size(max(rows) * stored),
    )


def _step_scratch(impl: str, parameter_bytes: int, largest_shard_bytes: int) -> int:
    """foreach makes denominators as large as all parameters, forloop three of one parameter's size, fused none."""
    return {"fused": 0, "foreach": parameter_bytes, "forloop": 3 * largest_shard_bytes}[impl]
