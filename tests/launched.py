"""The real command line in real processes: small runs in a folder of the test's own, and what is left of them.

Takes a folder, gives a Place whose runs queue behind each other and behind nobody else's.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrator import ledger
from orchestrator.ledger import RunRecord
from orchestrator.project import SOURCE_ROOT
from tests.small_run import SMALL, text_file

TIMEOUT_S = 120.0
ENDLESS = "budget.max_steps=1000000"


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; fails after a long while."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Folders of runs, of leases and of data."""

    root: Path
    runs_dir: Path
    source: Path = SOURCE_ROOT
    """Where the program is started from."""

    def overrides(self, *more: str) -> list[str]:
        """The words of a small run here."""
        where = [f"launch.runs_dir={self.runs_dir}", f"launch.lease_dir={self.root / 'leases'}"]
        return [*SMALL, f"data.path={text_file(self.root)}", "tracking=none", "launch.cpu_slots=2", *where, *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        """`run` in a process group of its own, as a shell starts it."""
        return self._process(*self.overrides(*more))

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        """`run`, to its end."""
        return self._done(self.start(*more))

    def verb(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Another verb, from another shell."""
        return self._done(self.start_verb(verb, *words))

    def start_verb(self, verb: str, *words: str) -> subprocess.Popen[str]:
        return self._process(verb, *words, "--runs-dir", str(self.runs_dir))

    def _process(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *words],
            cwd=self.source,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _done(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert "Traceback" not in out + err, out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def records(self) -> list[RunRecord]:
        """All runs, oldest first."""
        return [ledger.read(path) for path in ledger.run_dirs(self.runs_dir)]

    def only(self) -> RunRecord:
        """The one run here."""
        (record,) = self.records()
        return record

    def until_step(self, step: int) -> RunRecord:
        """The one run here, once it has come so far."""
        until(lambda: self.records() and self.only().last_step is not None)
        until(lambda: (seen := self.only().last_step) is not None and seen.step >= step)
        return self.only()

    def processes(self) -> list[str]:
        """Command lines of living processes that name a folder of this place, ended ones left out."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            words = process.info["cmdline"] or []
            dead = process.info["status"] == psutil.STATUS_ZOMBIE
            if process.info["pid"] != os.getpid() and not dead and any(str(self.runs_dir) in word for word in words):
                found.append(" ".join(words))
        return found


def place(root: Path) -> Place:
    """A place in this folder."""
    return Place(root=root, runs_dir=root / "runs")


def done(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in out + err, out + err
    return process.returncode, out, err
