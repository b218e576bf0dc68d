"""Real training that takes a fraction of a second: a text of about 100 kB, the tiny model, short sequences.

`train_here` runs the loop in this process as a gloo group of one; `train_ranks` starts real processes, forked
from a server that has imported torch already, each of which runs what `python -m train` runs.
"""

import contextlib
import multiprocessing
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from tests.specs import train_spec
from train.__main__ import main
from train.corpus import Corpus, prepare
from train.loop import Surroundings, train
from train.report import STEPS_FILE, StepReport, TrainReport, read_steps
from train.spec import TrainSpec

SMALL = (
    "model=tiny",
    "model.num_layers=2",
    "model.d_model=64",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.d_mlp=128",
    "data=text",
    "device=cpu",
    "train.seq_len=64",
    "train.micro_batch=4",
    "train.eval.sequences=8",
    "optim.warmup_steps=2",
    "budget.max_steps=6",
)
_TIMEOUT_S = 300.0


@cache
def text() -> str:
    """About 100 kB of words from a small vocabulary, with letters of two and three bytes."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyzäß€", k=rng.randint(1, 9))) for _ in range(400)]
    return "".join(rng.choice(words) + rng.choice(" \n  ") for _ in range(16_000))


def text_file(folder: Path) -> Path:
    """`text` in a file of this folder."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(text(), encoding="utf-8")
    return path


def small_spec(folder: Path, *overrides: str) -> TrainSpec:
    """A small run on `text_file` of this folder."""
    return train_spec(*SMALL, f"data.path={text_file(folder)}", *overrides)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """This process as a gloo group of one, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def surroundings(
    spec: TrainSpec,
    run_dir: Path,
    *,
    attempt: int = 1,
    corpus: Corpus | None = None,
    predicted_peak_bytes: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    on_step: Callable[[StepReport], None] = lambda report: None,
    say: Callable[[str], None] = lambda line: None,
) -> Surroundings:
    """Surroundings on CPU, with the data prepared."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return Surroundings(
        run_dir=run_dir,
        attempt=attempt,
        device=torch.device("cpu"),
        corpus=corpus or prepare(spec.data, spec.model, spec.train.seq_len, run_dir.parent / "cache"),
        predicted_peak_bytes=predicted_peak_bytes,
        stop_requested=stop_requested,
        on_step=on_step,
        say=say,
    )


def train_here(spec: TrainSpec, run_dir: Path, **kwargs: object) -> TrainReport:
    """Train in this process; needs `one_rank` around it."""
    return train(spec, surroundings(spec, run_dir, **kwargs))  # type: ignore[arg-type]


def losses(run_dir: Path) -> list[float]:
    """Training losses of all steps."""
    return [step.loss for step in read_steps(run_dir / STEPS_FILE)]


def train_ranks(spec: TrainSpec, run_dir: Path) -> list[int]:
    """Train with as many processes as the spec plans; their exit codes. What rank r prints is in rank<r>.log."""
    run_dir.mkdir(parents=True, exist_ok=True)
    spec_file = run_dir / "spec.json"
    spec_file.write_text(spec.model_dump_json(), encoding="utf-8")
    return on_ranks(spec.parallel.world_size, run_dir, main, [str(spec_file), str(run_dir)])


def on_ranks(world: int, folder: Path, function: Callable[..., int | None], *args: object) -> list[int]:
    """Call a function in `world` processes with the variables of a rank set; their exit codes, 1 for an exception."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.small_run", "torch._dynamo"])  # torch imports it late, in each process
    ranks = [
        context.Process(target=_rank, args=(folder, rank, world, port, function, args), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_TIMEOUT_S)
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]


def log(run_dir: Path, rank: int = 0) -> str:
    """What this rank printed, in all attempts."""
    return (run_dir / f"rank{rank}.log").read_text(encoding="utf-8")


def _rank(
    folder: Path, rank: int, world: int, port: int, function: Callable[..., int | None], args: tuple[object, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    file = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    code = 1
    try:
        code = function(*args) or 0
    except BaseException:  # noqa: BLE001 - shown in the log
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
