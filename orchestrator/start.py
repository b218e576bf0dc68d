"""From an accepted plan to a started run, and, where asked, to its end.

Takes the spec and the plan's JSON, gives the run folder and the exit code. Everything that can be refused is
refused before a folder is claimed.
"""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from orchestrator import ledger
from orchestrator.errors import ConfigError, ExitCode, NotSubmittedError
from orchestrator.launch import folder, freeze, inline, local
from orchestrator.launch.follow import ending, follow, inline_progress
from orchestrator.planner import Plan
from orchestrator.project import SOURCE_ROOT
from orchestrator.spec import RunSpec
from train.checks import unsupported
from train.corpus import Corpus, DataError, prepare

_WATCHER_START_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run that was started."""

    run_dir: Path
    exit_code: int


def start(spec: RunSpec, plan: Plan, answer: dict[str, object]) -> Started:
    """Data, folder, frozen code, submission; then follow it where launch.wait says so."""
    console = _console(spec)
    refused = unsupported(spec.train)
    if refused:
        raise ConfigError(refused)
    local.check_machine(spec)
    folder.check_space(spec)
    corpus = prepare_data(spec)
    spec, run_dir = folder.claim(spec)
    folder.write_plan(run_dir, spec, answer)
    try:
        launched = _launch(spec, run_dir, corpus, attempt=1, console=console, plan_line=plan.verdict.reason)
    except (NotSubmittedError, ConfigError):
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return launched


def restart(spec: RunSpec, run_dir: Path, corpus: Corpus, attempt: int, plan_line: str) -> Started:
    """A further attempt of a run, in the same folder and from the same frozen code."""
    return _launch(spec, run_dir, corpus, attempt=attempt, console=_console(spec), plan_line=plan_line)


def prepare_data(spec: RunSpec) -> Corpus:
    """The tokens, from the cache beside the runs; raises ConfigError for what a user can mend."""
    cache = Path(spec.launch.runs_dir).expanduser().resolve() / ".data"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return prepare(spec.train.data, spec.train.model, spec.train.train.seq_len, cache)
    except DataError as error:
        raise ConfigError([error.problem]) from error
    except OSError as error:
        raise NotSubmittedError(
            f"launch.runs_dir={spec.launch.runs_dir}: {cache} cannot be written ({error.strerror}). Nothing was "
            "started. Set launch.runs_dir to a folder that you can write, with room for the tokens."
        ) from error


def _console(spec: RunSpec) -> Console:
    return Console(stderr=spec.output == "json")


def _launch(spec: RunSpec, run_dir: Path, corpus: Corpus, *, attempt: int, console: Console, plan_line: str) -> Started:
    try:
        frozen = _frozen(run_dir, attempt)
        command = ("python", "-m", "orchestrator", *sys.argv[1:])
        submission = local.plan_submission(spec, attempt, command, frozen)
        ledger.write(run_dir / folder.CORPUS_FILE, corpus)
        _say(console, f"{spec.name}: {plan_line}")
        if spec.launch.kind == "inline":
            with inline_progress(run_dir, console) as on_step:
                inline.run(run_dir, spec, submission, on_step)
        else:
            submission = local.submit(run_dir, submission)
    except OSError as error:
        raise NotSubmittedError(
            f"launch.runs_dir: {run_dir} cannot be written ({error.strerror}). Nothing was started."
        ) from error
    if spec.launch.kind == "local" and not spec.launch.wait:
        _say(console, f"submitted {spec.name} (job {submission.job_id})\n  folder  {run_dir}")
        record = ledger.read(run_dir)
        for verb in ("logs -f", "wait", "cancel"):
            _say(console, f"  {ledger.command(verb, record)}")
        return Started(run_dir=run_dir, exit_code=ExitCode.DONE)
    record = follow(run_dir, console, started_here=True)
    _say(console, ending(record))
    return Started(run_dir=run_dir, exit_code=exit_code(record))


def exit_code(record: ledger.RunRecord) -> int:
    """What the program exits with for a run that has ended."""
    return int(ExitCode.RUN_FAILED) if record.exit is None else record.exit.exit_code


def _frozen(run_dir: Path, attempt: int) -> freeze.Frozen:
    """The copy of the source: made for the first attempt, the same for all later ones."""
    if attempt == 1:
        frozen = freeze.freeze(SOURCE_ROOT, run_dir.parent)
        if frozen.patch:
            (run_dir / "code.patch").write_text(frozen.patch, encoding="utf-8", errors="surrogateescape")
        return frozen
    earlier = ledger.read(run_dir).submission
    assert earlier is not None
    patch = run_dir / "code.patch"
    code = Path(earlier.code)
    if not code.is_dir():
        raise NotSubmittedError(f"the source that {run_dir.name} was started with is gone: {code}.")
    text = patch.read_text(encoding="utf-8", errors="surrogateescape") if patch.exists() else ""
    return freeze.Frozen(code=code, commit=earlier.commit, patch=text)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def wait_for_watcher(run_dir: Path) -> ledger.RunRecord:
    """The record once the run's watcher is there, or has ended: a cancel right after a submit finds it."""
    deadline = time.monotonic() + _WATCHER_START_S
    while True:
        record = ledger.read(run_dir)
        if record.node is not None or record.state in ledger.ENDED or time.monotonic() > deadline:
            return record
        time.sleep(0.1)
