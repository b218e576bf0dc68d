"""Checks across settings, each giving a message a person can act on.

Takes the sections of a TrainSpec that are valid by themselves, gives Problems. It must not import torch.
"""

from collections.abc import Callable, Mapping

from train.spec import (
    BudgetSpec,
    CkptSpec,
    DataSpec,
    DeviceSpec,
    LoopSpec,
    ModelSpec,
    OptimSpec,
    ParallelSpec,
    Problem,
    Spec,
    TrainSpec,
    as_typed,
)


def problems(sections: Mapping[str, Spec]) -> list[Problem]:
    """All problems between and within these sections; a check whose sections are missing is left out."""
    found: list[Problem] = []
    for names, check in _CHECKS:
        if all(name in sections for name in names):
            found += check(*(sections[name] for name in names))
    return found


def unsupported(spec: TrainSpec) -> list[Problem]:
    """Settings that are valid names but that this trainer does not carry out."""
    found = []
    if spec.parallel.cpu_offload:
        found.append(_problem("parallel.cpu_offload", True, "the trainer does not offload yet", "Set it to false"))
    return found


def _problem(key: str, value: object, why: str, fix: str) -> Problem:
    return Problem(key=key, value=as_typed(value), why=why, fix=fix)


def _or_list(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    return ", ".join(str(v) for v in values[:-1]) + f" or {values[-1]}"


def _check_model(model: ModelSpec) -> list[Problem]:
    found = []
    heads = [h for h in range(1, model.d_model + 1) if model.d_model % h == 0]
    heads_and_kv = [h for h in heads if h % model.num_kv_heads == 0]
    if model.d_model % model.num_heads:
        found.append(
            _problem(
                "model.num_heads",
                model.num_heads,
                f"{model.num_heads} heads do not divide model.d_model={model.d_model}",
                f"Set it to {_or_list(heads_and_kv or heads)}",
            )
        )
    elif model.num_heads % model.num_kv_heads:
        divisors = [k for k in range(1, model.num_heads + 1) if model.num_heads % k == 0]
        found.append(
            _problem(
                "model.num_kv_heads",
                model.num_kv_heads,
                f"{model.num_kv_heads} key-value heads cannot serve model.num_heads={model.num_heads} evenly",
                f"Set it to {_or_list(divisors)}",
            )
        )
    if model.position == "rope" and model.rope_theta is None:
        found.append(
            _problem(
                "model.rope_theta",
                None,
                "model.position=rope needs the base of its frequencies",
                "Set it to a number, 10000.0 in the original",
            )
        )
    if model.position == "rope" and model.head_dim % 2:
        found.append(
            _problem(
                "model.head_dim",
                model.head_dim,
                "model.position=rope turns pairs of numbers",
                "Set it to an even number",
            )
        )
    return found


def _check_ckpt(model: ModelSpec, ckpt: CkptSpec) -> list[Problem]:
    found = _check_saved(model, ckpt)
    if ckpt.policy not in ("selective", "ops"):
        return found + [
            _problem(
                f"ckpt.{name}",
                getattr(ckpt, name),
                f"it chooses blocks for ckpt=selective and ckpt=ops, and this run has ckpt={ckpt.policy}",
                "Set ckpt=selective or ckpt=ops, or leave it out (null)",
            )
            for name in ("every", "layers", "first", "last")
            if getattr(ckpt, name) is not None
        ]
    chosen = [name for name in ("layers", "first", "last") if getattr(ckpt, name) is not None]
    if len(chosen) > 1:
        found.append(
            _problem(
                f"ckpt.{chosen[1]}",
                getattr(ckpt, chosen[1]),
                f"ckpt.{chosen[0]}={as_typed(getattr(ckpt, chosen[0]))} names the blocks already",
                f"Set {'one of the two' if len(chosen) == 2 else 'two of layers, first and last'} to null",
            )
        )
    last = model.num_layers - 1
    outside = [i for i in ckpt.layers or () if i > last]
    if outside:
        found.append(
            _problem(
                "ckpt.layers",
                ckpt.layers,
                f"{_or_list(outside)} is not a block of model.num_layers={model.num_layers}",
                f"Use numbers from 0 to {last}",
            )
        )
    found += [
        _problem(
            f"ckpt.{name}",
            getattr(ckpt, name),
            f"the model has only model.num_layers={model.num_layers} blocks",
            f"Set it to at most {model.num_layers}",
        )
        for name in ("first", "last")
        if (getattr(ckpt, name) or 0) > model.num_layers
    ]
    if not chosen and (ckpt.every is None or ckpt.every > model.num_layers):
        found.append(
            _problem(
                "ckpt.every",
                ckpt.every,
                f"no block of model.num_layers={model.num_layers} would recompute",
                f"Set it to a number from 1 to {model.num_layers}, or use ckpt=none",
            )
        )
    return found


def _check_saved(model: ModelSpec, ckpt: CkptSpec) -> list[Problem]:
    """What ckpt=ops keeps, by name."""
    if ckpt.policy != "ops":
        if ckpt.save is None:
            return []
        why = f"it names what blocks keep under ckpt=ops, and this run has ckpt={ckpt.policy}"
        return [_problem("ckpt.save", ckpt.save, why, "Set ckpt=ops, or leave it out (null)")]
    if not ckpt.save:
        why = "ckpt=ops keeps the outputs that it names, and it names none"
        return [_problem("ckpt.save", ckpt.save, why, "Name some, as in ckpt.save=[attention,qkv], or use ckpt=full")]
    names = (ckpt.save,) if isinstance(ckpt.save, str) else ckpt.save
    if "mlp_gate" in names and model.mlp == "gelu":
        why = "model.mlp=gelu has no gate"
        return [_problem("ckpt.save", ckpt.save, why, "Leave mlp_gate out; mlp_up is the product before the gelu")]
    return []


def _check_compile(ckpt: CkptSpec, train: LoopSpec) -> list[Problem]:
    if ckpt.policy == "ops" and train.compile:
        why = "ckpt=ops saves by the names of a block's layers, and a compiled block has none left"
        return [_problem("train.compile", True, why, "Set it to false, or use ckpt=selective or ckpt=full")]
    return []


def _check_length(model: ModelSpec, train: LoopSpec) -> list[Problem]:
    if model.position == "learned" and train.seq_len > model.context_length:
        return [
            _problem(
                "train.seq_len",
                train.seq_len,
                f"the learned positions end at model.context_length={model.context_length}",
                f"Set it to at most {model.context_length}, or raise model.context_length",
            )
        ]
    return []


def _check_schedule(optim: OptimSpec, budget: BudgetSpec) -> list[Problem]:
    limits = ("max_steps", "max_tokens", "max_wall_time_s", "max_device_hours")
    if all(getattr(budget, name) is None for name in limits):
        return [
            _problem(
                "budget.max_steps",
                None,
                "nothing would end this run",
                "Set at least one of " + ", ".join(f"budget.{name}" for name in limits),
            )
        ]
    if (
        optim.schedule == "cosine"
        and optim.decay_steps is None
        and budget.max_steps is None
        and budget.max_tokens is None
    ):
        return [
            _problem(
                "optim.decay_steps",
                None,
                "optim.schedule=cosine must know its length, and the budget names no steps or tokens",
                "Set optim.decay_steps, budget.max_steps or budget.max_tokens, or optim.schedule=constant",
            )
        ]
    return []


def _check_tokens(budget: BudgetSpec, train: LoopSpec, parallel: ParallelSpec) -> list[Problem]:
    a_step = train.micro_batch * train.grad_accum * parallel.world_size * train.seq_len
    if budget.max_tokens is not None and budget.max_tokens < a_step:
        return [
            _problem(
                "budget.max_tokens",
                budget.max_tokens,
                f"one optimizer step takes {a_step} tokens",
                f"Set it to {a_step} or more, or make the step smaller",
            )
        ]
    return []


def _check_data(data: DataSpec, model: ModelSpec) -> list[Problem]:
    if data.source == "text" and not data.path:
        return [
            _problem(
                "data.path",
                data.path,
                "data=text reads files that you name",
                "Set it to a UTF-8 file or folder, or to a list: data.path=[a.txt,b/]",
            )
        ]
    if data.source == "stdlib" and data.path is not None:
        return [
            _problem(
                "data.path",
                data.path,
                "data=stdlib reads the Python library, whatever the path",
                "Set data=text with it, or leave it out (null)",
            )
        ]
    if data.tokenizer == "bytes" and model.vocab_size < 256:
        return [
            _problem(
                "model.vocab_size",
                model.vocab_size,
                "data.tokenizer=bytes gives tokens from 0 to 255",
                "Set it to 256 or more",
            )
        ]
    return []


def _check_parallel(parallel: ParallelSpec, device: DeviceSpec) -> list[Problem]:
    if parallel.shard == "hsdp" and parallel.nodes == 1:
        return [
            _problem(
                "parallel.shard",
                "hsdp",
                "it replicates across nodes, and parallel.nodes=1",
                "Set it to fsdp, or parallel.nodes to 2 or more",
            )
        ]
    if parallel.cpu_offload and device.kind == "cpu":
        return [
            _problem(
                "parallel.cpu_offload",
                True,
                "with device=cpu all is in host memory already",
                "Set it to false",
            )
        ]
    return []


_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., list[Problem]]], ...] = (
    (("model",), _check_model),
    (("model", "ckpt"), _check_ckpt),
    (("ckpt", "train"), _check_compile),
    (("model", "train"), _check_length),
    (("optim", "budget"), _check_schedule),
    (("budget", "train", "parallel"), _check_tokens),
    (("data", "model"), _check_data),
    (("parallel", "device"), _check_parallel),
)
