"""Bytes that do not depend on the batch: parameters, gradients, optimizer states, and FSDP's buffers.

Takes a TrainSpec, gives bytes of one rank. Sources: torch/distributed/fsdp/_fully_shard (_fsdp_param.py pads dim 0 to
a multiple of the ranks; _fsdp_collectives.py makes the buffers), torch/optim/adamw.py.
"""

from dataclasses import dataclass
from itertools import accumulate

from orchestrator.memory.block import FP32, Setting
from train import shapes
from train.spec import ModelSpec, ParallelSpec


@dataclass(frozen=True, kw_only=True)
class Group:
    """One FSDP group, a block or the root: its parameters in the ways a rank holds them, bytes."""

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
    cast_bytes: int
    """Above the unsharded parameters while one rank alone casts them, one after the other, each beside its copy."""
    reduce_bytes: int
    """All gradients in the precision of the reduction, padded: the reduce-scatter's input."""
    shard_bytes: tuple[int, ...]
    """The rank's rows of each parameter, in the module's order."""
    last_gradient_bytes: int
    """Unsharded gradient of the last parameter, which outlives the copy into the reduce-scatter's input.

    foreach_reduce has it as a loop's variable to its end (_fsdp_collectives.py), where there are ranks to scatter to.
    """


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
    counts = here.size(FP32) * (len(root.shard_bytes) + layers * len(block.shard_bytes))
    return States(
        block=block,
        root=root,
        parameter_bytes=parameter_bytes,
        gradient_bytes=root.gradient_bytes + layers * block.gradient_bytes,
        optimizer_bytes=2 * parameter_bytes + (counts if not here.on_cuda or spec.optim.impl == "fused" else 0),
        optimizer_step_scratch_bytes=_step_scratch(spec.model, spec.optim.impl, root, block, parameter_bytes),
        largest_shard_bytes=max(*block.shard_bytes, *root.shard_bytes),
    )


def _group(here: Setting, parameters: tuple[shapes.Shape, ...]) -> Group:
    ranks, mixed = shard_ranks(here.spec.parallel), here.spec.train.precision == "bf16_mixed"
    stored, computed = FP32 if mixed else here.width, here.width
    rows = [-(-s.dims[0] // ranks) * (s.numel // s.dims[0]) for s in parameters]
    numel = sum(rows)
    size = here.size
    unsharded = [size(n * ranks * computed) for n in rows]
    casting = max(done + last for done, last in zip(accumulate(unsharded), unsharded, strict=True)) - sum(unsharded)
    return Group(
        sharded_bytes=sum(size(n * stored) for n in rows),
        gradient_bytes=size(numel * stored),
        unsharded_bytes=sum(unsharded),
        gathered_bytes=size(numel * ranks * computed) if ranks > 1 else 0,
        gather_input_bytes=size(numel * computed) if ranks > 1 and mixed else 0,
        cast_bytes=max(0, casting) if ranks == 1 and mixed else 0,
        reduce_bytes=size(numel * ranks * stored),
        shard_bytes=tuple(size(n * stored) for n in rows),
        last_gradient_bytes=size(parameters[-1].numel * computed) if ranks > 1 else 0,
    )


def _step_scratch(model: ModelSpec, impl: str, root: Group, block: Group, parameter_bytes: int) -> int:
    """foreach makes denominators as large as all parameters, fused nothing; forloop see _forloop_scratch."""
    if impl == "forloop":
        return _forloop_scratch(model, root, block)
    return parameter_bytes if impl == "foreach" else 0


def _forloop_scratch(model: ModelSpec, root: Group, block: Group) -> int:
    """Two tensors of a parameter's size while the denominator of the one before is still named.

    Source: torch/optim/adam.py, _single_tensor_adam. train/optim.py gives it the matrices first, then the vectors, each
    in the module's order: embedding and positions, blocks, norm and head.
    """
    of_root = list(zip(shapes.root_parameters(model), root.shard_bytes, strict=True))
    of_block = list(zip(shapes.block_parameters(model), block.shard_bytes, strict=True))
    first = 2 if model.position == "learned" else 1
    # Of equal blocks two have every neighbourhood.
    inside = of_block * min(2, model.num_layers)
    order = sorted([*of_root[:first], *inside, *of_root[first:]], key=lambda each: len(each[0].dims) < 2)
    sizes = [size for _, size in order]
    return max(2 * size + before for before, size in zip([0, *sizes], sizes, strict=False))
