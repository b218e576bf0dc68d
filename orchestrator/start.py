"""From an accepted plan to a started run, and, where asked, to its end.

Takes the spec and the plan's JSON, gives the run folder and the exit code. Everything that can be refused is
refused before a folder is claimed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from orchestrator import ledger
from orchestrator.errors import ConfigError, ExitCode, NotSubmittedError, RunFailedError
from orchestrator.launch import folder, freeze, inline, local
from orchestrator.launch.follow import ending, follow, inline_progress
from orchestrator.launch.stopping import Interrupts
from orchestrator.ledger import RunRecord, Submission
from orchestrator.planner import Plan
from orchestrator.project import SOURCE_ROOT
from orchestrator.spec import RunSpec
from train.checks import unsupported
from train.corpus import Corpus, DataError, prepare


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run that was started."""

    run_dir: Path
    exit_code: int
    interrupted: bool
    """Whether Ctrl-C asked it to stop; what was to follow it is then not wanted either."""


def start(spec: RunSpec, plan: Plan, answer: dict[str, object]) -> Started:
    """Data, folder, frozen code, submission; then follow it where launch.wait says so."""
    refused = unsupported(spec.train)
    if refused:
        raise ConfigError(refused)
    local.check_machine(spec)
    folder.check_space(spec)
    corpus = prepare_data(spec)
    spec, run_dir = folder.claim(_with_absolute_paths(spec))
    return launch(spec, run_dir, corpus, attempt=1, plan=plan, answer=answer)


def launch(
    spec: RunSpec, run_dir: Path, corpus: Corpus, *, attempt: int, plan: Plan, answer: dict[str, object]
) -> Started:
    """Start this attempt in its claimed folder, and follow it; where it cannot be started, nothing is left of it."""
    console = _console(spec)
    try:
        if attempt > 1:
            folder.set_aside(run_dir, attempt - 1)
        folder.write_plan(run_dir, spec, answer)
        submission = _planned(spec, run_dir, corpus, attempt)
        _say(console, f"{spec.name}: {plan.verdict.reason}")
    except BaseException:  # Ctrl-C too
        folder.undo(run_dir, attempt)
        raise
    if spec.launch.kind == "inline":
        return _inline(spec, run_dir, submission, console)
    with Interrupts() as interrupts:
        try:
            submission = local.submit(run_dir, submission)
        except NotSubmittedError:
            folder.undo(run_dir, attempt)
            raise
        if not spec.launch.wait and not interrupts.count:
            _say(console, _submitted(ledger.read(run_dir), submission))
            return Started(run_dir=run_dir, exit_code=ExitCode.DONE, interrupted=False)
        record = follow(run_dir, console, interrupts)
        _say(console, ending(record))
    return Started(run_dir=run_dir, exit_code=exit_code(record), interrupted=interrupts.count > 0)


def _with_absolute_paths(spec: RunSpec) -> RunSpec:
    """The spec as any other shell, in any other folder, can use it."""
    data = spec.train.data

    def absolute(name: str) -> str:
        return str(Path(name).expanduser().absolute())

    path = data.path
    if path is not None:
        path = absolute(path) if isinstance(path, str) else tuple(absolute(name) for name in path)
    tokenizer = data.tokenizer if data.tokenizer == "bytes" else absolute(data.tokenizer)
    data = data.model_copy(update={"path": path, "tokenizer": tokenizer})
    return spec.model_copy(update={"train": spec.train.model_copy(update={"data": data})})


def prepare_data(spec: RunSpec) -> Corpus:
    """The tokens, from the cache beside the runs; raises ConfigError for what a user can mend."""
    cache = Path(spec.launch.runs_dir).expanduser().resolve() / ".data"
    try:
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


def _planned(spec: RunSpec, run_dir: Path, corpus: Corpus, attempt: int) -> Submission:
    """What will be started, with all that it reads in its place."""
    try:
        frozen = _frozen(run_dir, attempt)
        command = ("python", "-m", "orchestrator", *sys.argv[1:])
        submission = local.plan_submission(spec, attempt, command, frozen)
        ledger.write(run_dir / folder.CORPUS_FILE, corpus)
    except OSError as error:
        raise NotSubmittedError(
            f"launch.runs_dir: {error.filename or run_dir} cannot be written ({error.strerror}). Nothing was started."
        ) from error
    return submission


def _inline(spec: RunSpec, run_dir: Path, submission: Submission, console: Console) -> Started:
    try:
        with inline_progress(run_dir, console) as on_step:
            inline.run(run_dir, spec, submission, on_step)
    except OSError as error:
        raise RunFailedError(
            f"{error.filename or run_dir}: {error.strerror}. Free space there, then resume."
        ) from error
    record = ledger.read(run_dir)
    _say(console, ending(record))
    return Started(run_dir=run_dir, exit_code=exit_code(record), interrupted=record.state == "cancelled")


def _submitted(record: RunRecord, submission: Submission) -> str:
    head = f"submitted {record.name} (job {submission.job_id})\n  folder  {record.run_dir}"
    return "\n".join([head, *(f"  {ledger.command(verb, record)}" for verb in ("logs -f", "wait", "cancel"))])


def exit_code(record: RunRecord) -> int:
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
    recorded = Path(earlier.code)
    # The runs folder may have been moved, with the copies in it.
    code = next((path for path in (recorded, freeze.copies(run_dir.parent) / recorded.name) if path.is_dir()), None)
    if code is None:
        raise NotSubmittedError(f"the source that {run_dir.name} was started with is gone: {recorded}.")
    text = patch.read_text(encoding="utf-8", errors="surrogateescape") if patch.exists() else ""
    return freeze.Frozen(code=code, commit=earlier.commit, patch=text)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
