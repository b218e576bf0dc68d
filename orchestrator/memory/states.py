"""Bytes that do not depend on the batch: parameters, gradients, optimizer states, and FSDP's buffers.

Takes a TrainSpec, gives bytes of one rank. Sources: torch/distributed/fsdp/_fully_shard (_fsdp_param.py pads dim 0 to
a multiple of the ranks; _fsdp_collectives.py makes the buffers), torch/optim/adamw.py.
"""

from dataclasses import dataclass

from train import shapes
from train.spec import TrainSpec

FP32 = 4
_STEP_BYTES = 4
"""AdamW counts steps in one fp32 number a parameter."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """One FSDP group, a block or the root: its parameters in the ways a rank holds them."""

    sharded_bytes: int
    """The rank's rows, fp32, padded."""
    unsharded_bytes: int
    """All rows in the compute precision, padded; also the all-gather's output."""
    reduce_bytes: int
    """All gradients in fp32, padded: the reduce-scatter's input."""
    largest_unsharded_bytes: int
    """The largest single parameter, unsharded in the compute precision."""


@dataclass(frozen=True, kw_only=True)
class States:
    """What one rank holds of model and optimizer, bytes."""

    block: Group
    root: Group
    parameter_bytes: int
    """All shards."""
    gradient_bytes: int
    """Gradients of all shards, fp32."""
    optimizer_bytes: int
    """AdamW's two moments and step counts."""
    optimizer_step_scratch_bytes: int
    """Alive for a moment in optimizer.step()."""
    largest_shard_bytes: int
    """The largest single shard."""


def states(spec: TrainSpec, width: int) -> States:
    """Bytes of rank 0, which holds most; `width` is bytes of a number in the compute precision."""
    ranks = spec.parallel.world_size
    block = _group(shapes.block_parameters(spec.model), ranks, width)
    root = _group(shapes.root_parameters(spec.model), ranks, width)
    layers = spec.model.num_layers
    parameter_bytes = root.sharded_bytes + layers * block.sharded_bytes
    tensors = len(shapes.root_parameters(spec.model)) + layers * len(shapes.block_parameters(spec.model))
    shards = [_rows(s, ranks) * FP32 for s in shapes.root_parameters(spec.model) + shapes.block_parameters(spec.model)]
    return States(
        block=block,
        root=root,
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
        optimizer_bytes=2 * parameter_bytes + _STEP_BYTES * tensors,
        optimizer_step_scratch_bytes=_step_scratch(spec.optim.impl, parameter_bytes, max(shards)),
        largest_shard_bytes=max(shards),
    )


def _group(parameters: tuple[shapes.Shape, ...], ranks: int, width: int) -> Group:
    shard = sum(_rows(s, ranks) for s in parameters)
    return Group(
        sharded_bytes=shard * FP32,
        unsharded_bytes=shard * ranks * width,
        reduce_bytes=shard * ranks * FP32,
        largest_unsharded_bytes=max(_rows(s, ranks) for s in parameters) * ranks * width,
    )


def _rows(shape: shapes.Shape, ranks: int) -> int:
    """Numbers of one rank's rows, dim 0 padded to a multiple of the ranks."""
    return -(-shape.dims[0] // ranks) * (shape.numel // shape.dims[0])


def _step_scratch(impl: str, parameter_bytes: int, largest_shard_bytes: int) -> int:
    """foreach makes denominators as large as all parameters, forloop three of one parameter's size, fused none."""
    return {"fused": 0, "foreach": parameter_bytes, "forloop": 3 * largest_shard_bytes}[impl]
