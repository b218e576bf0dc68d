"""FSDP2: mixed precision and sharding of blocks and root, on any number of ranks and also on one.

Takes the module on the meta device, gives it sharded and materialised on the device.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from train.activation import apply_checkpointing
from train.model import Transformer, build, initialise
from train.spec import ParallelSpec, TrainSpec

_RESHARD = {"default": None, "always": True, "never": False}


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """bf16_mixed computes in bf16 and reduces gradients in fp32; the others compute in the parameters' dtype."""
    if precision == "bf16_mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def device_mesh(parallel: ParallelSpec, device_type: str) -> DeviceMesh:
    """One axis for fsdp; (replicate, shard) for hsdp and for none, which is a shard axis of one."""
    world = parallel.world_size
    if parallel.shard == "fsdp":
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    shard = parallel.devices_per_node if parallel.shard == "hsdp" else 1
    return init_device_mesh(device_type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def build_sharded(spec: TrainSpec, device: torch.device) -> Transformer:
    """The model of `spec`: checkpointing, then compile, then fully_shard, then weights.

    Every rank holds its rows of dim 0 only; needs an initialised process group.
    """
    module = build(spec.model, dropout=spec.train.dropout)
    if spec.train.precision == "bf16":
        module = module.to(torch.bfloat16)
    apply_checkpointing(module, spec.ckpt)
    if spec.train.compile:
        for block in module.blocks:
            block.compile()
    mesh = device_mesh(spec.parallel, device.type)
    policy = mixed_precision(spec.train.precision)
    reshard = _RESHARD[spec.parallel.reshard_after_forward]
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    module.to_empty(device=device)
    initialise(module, spec.train.seed)
    return module
