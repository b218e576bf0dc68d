"""How long an estimate takes, how much memory, and how that grows with layers and ranks.

`python -m tests.bench.estimate_speed` prints each figure beside its goal: milliseconds a config in a process that is
warm, seconds of a cold `check`, bytes that Python allocates for one estimate, seconds of a judged sweep of 10,000
configs. Others at work on the machine lengthen all but the bytes, so its load comes first. `--profile` prints where the
time of the sweep goes instead.
"""

import argparse
import cProfile
import itertools
import os
import pstats
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator

from orchestrator.memory.formula import estimate
from orchestrator.oomguard import judge
from tests.bench import check_time
from tests.specs import train_spec
from train.spec import TrainSpec

_GOAL_MS, _GOAL_CHECK_S, _GOAL_SWEEP_S, _SWEEP = 1.0, 0.8, 10.0, 10_000
_MODELS = ("gpt2_xl", "llama2_7b", "llama3_8b", "qwen3_8b", "llama3_70b", "behemoth", "tinyllama_1b", "llama3_405b")
_POLICIES = (
    ("ckpt=none",),
    ("ckpt=full",),
    ("ckpt=selective", "ckpt.every=2"),
    ("ckpt=selective", "ckpt.layers=[0,3,5]"),
    ("ckpt=ops", "ckpt.save=every_second_matmul"),
    ("ckpt=ops", "ckpt.save=[attention,qkv]"),
)


def configs(count: int, seed: int = 0) -> list[TrainSpec]:
    """`count` different specs, varied over model, policy, batch, precision, loss, sharding and ranks."""
    bases = [
        train_spec(f"model={model}", *policy, "device=a100_80gb", "train.precision=bf16_mixed")
        for model, policy in itertools.product(_MODELS, _POLICIES)
    ]
    rng = random.Random(seed)
    found: list[TrainSpec] = []
    seen: set[tuple[object, ...]] = set()
    while len(found) < count:
        base = rng.randrange(len(bases))
        change = _change(rng)
        key = (base, *change.values())
        if key not in seen:
            seen.add(key)
            found.append(_changed(bases[base], change))
    return found


def _change(rng: random.Random) -> dict[str, object]:
    return {
        "train.micro_batch": rng.randint(1, 16),
        "train.grad_accum": rng.choice((1, 4)),
        "train.seq_len": rng.choice((128, 512, 1024)),
        "train.precision": rng.choice(("bf16_mixed", "bf16")),
        "train.loss": rng.choice(("full", "chunked")),
        "parallel.nodes": rng.choice((1, 2, 8, 64)),
        "parallel.devices_per_node": rng.choice((1, 2, 8)),
        "parallel.reshard_after_forward": rng.choice(("default", "always", "never")),
        "optim.impl": rng.choice(("fused", "foreach", "forloop")),
    }


def _changed(spec: TrainSpec, change: dict[str, object]) -> TrainSpec:
    sections: dict[str, dict[str, object]] = {}
    for key, value in change.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return spec.model_copy(
        update={name: getattr(spec, name).model_copy(update=values) for name, values in sections.items()}
    )


def estimate_ms(specs: list[TrainSpec]) -> list[float]:
    """Milliseconds of each estimate."""
    found = []
    for spec in specs:
        begin = time.perf_counter()
        estimate(spec)
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def peak_python_bytes(spec: TrainSpec) -> int:
    """Most that Python holds, beyond what it held before, during one estimate."""
    estimate(spec)  # what is made once for a process
    tracemalloc.start()
    try:
        estimate(spec)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def sweep_s(specs: list[TrainSpec]) -> float:
    """Seconds to estimate and judge all of them."""
    begin = time.perf_counter()
    for spec in specs:
        judge(spec, estimate(spec), spec.device.usable_bytes)
    return time.perf_counter() - begin


def _sizes() -> Iterator[tuple[str, TrainSpec]]:
    base = train_spec("model=llama3_8b", "ckpt=selective", "device=a100_80gb", "train.precision=bf16_mixed")
    for layers, ranks in itertools.product((2, 126), (1, 4096)):
        model = base.model.model_copy(update={"num_layers": layers})
        parallel = base.parallel.model_copy(update={"nodes": -(-ranks // 8), "devices_per_node": min(8, ranks)})
        yield f"{layers} layers, {ranks} ranks", base.model_copy(update={"model": model, "parallel": parallel})


def _goal(met: bool, goal: str) -> str:
    return f"{'met' if met else 'MISSED'}: {goal}"


def print_all() -> None:
    """Every figure beside its goal."""
    print(f"machine         {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before this began")
    specs = configs(_SWEEP)
    estimate_ms(specs[:200])
    times = sorted(estimate_ms(specs))
    median = statistics.median(times)
    print(
        f"warm estimate   median {median:.3f} ms, p95 {times[int(0.95 * len(times))]:.3f}, worst {times[-1]:.2f} "
        f"({len(specs)} configs)   {_goal(median <= _GOAL_MS, f'{_GOAL_MS:g} ms')}"
    )
    for name, spec in _sizes():
        kib, least_ms = peak_python_bytes(spec) / 1024, min(estimate_ms([spec] * 20))
        print(f"python memory   {kib:6.1f} KiB in {least_ms:.3f} ms  {name}")
    swept = sweep_s(specs)
    goal = _goal(swept <= _GOAL_SWEEP_S, f"{_GOAL_SWEEP_S:g} s")
    print(f"sweep judged    {swept:.1f} s for {len(specs)} configs   {goal}")
    for name, command in check_time._COMMANDS.items():
        cold = statistics.median(check_time.seconds(command) for _ in range(7))
        goal = "" if name == "python -c pass" else f"   {_goal(cold <= _GOAL_CHECK_S, f'{_GOAL_CHECK_S:g} s')}"
        print(f"cold            {cold:.2f} s  {name}{goal}", flush=True)


def print_profile() -> None:
    """Where the time of the sweep goes, by function."""
    specs = configs(2000)
    sweep_s(specs[:200])
    profile = cProfile.Profile()
    profile.runcall(sweep_s, specs)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    if parser.parse_args().profile:
        print_profile()
    else:
        print_all()
