"""The source as it is at launch: a copy that the ranks import, the commit, and the patch of a dirty tree.

Takes the project's folder, gives a Frozen. The copy holds what git tracks and what it does not ignore, is keyed by
its content, built aside and renamed.
"""

import filecmp
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import NotSubmittedError

_PACKAGES = ("orchestrator", "train", "conf")
_BLOCK_BYTES = 1 << 20
# Whatever the user's settings make of a diff to read, this one is to be applied.
_PLAIN_DIFF = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative", "--no-renames")
_PREFIXES = ("--src-prefix=a/", "--dst-prefix=b/")


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A copy of the source and where it came from."""

    code: Path
    commit: str | None
    patch: str
    """Difference to the commit, untracked files included; empty for a clean tree or outside git."""


def copies(runs_dir: Path) -> Path:
    """The folder of all copies beside these runs."""
    return runs_dir / ".code"


def freeze(source: Path, runs_dir: Path) -> Frozen:
    """Copy `source`, without `runs_dir`, to runs_dir/.code/<key>, unless the same content is there.

    Raises NotSubmittedError where the source cannot be read, OSError where the copy cannot be written.
    """
    ours = "orchestrator/__init__.py" in _listed(source, "--cached")
    tracked, untracked = (_outside(names, source, runs_dir) for names in _files(source, ours))
    code = _copy(source, sorted({*tracked, *untracked}), copies(runs_dir))
    head = _git(source, "rev-parse", "--verify", "--quiet", "HEAD")
    known = ours and head is not None and head.returncode == 0
    return Frozen(
        code=code,
        commit=head.stdout.decode().strip() if head is not None and known else None,
        patch=_patch(source, untracked, runs_dir) if known else "",
    )


def _git(
    source: Path, *arguments: str, env: dict[str, str] | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes] | None:
    """What git did, None where there is no git."""
    try:
        return subprocess.run(
            ["git", "-C", str(source), *arguments],
            input=stdin,
            capture_output=True,
            check=False,
            env=os.environ | (env or {}),
        )
    except FileNotFoundError:
        return None


def _files(source: Path, ours: bool) -> tuple[list[str], list[str]]:
    """Names of files that git tracks, and of those that it neither tracks nor ignores.

    Where git does not track this source (`ours` is false: no git, or installed inside somebody else's repository, whose
    commit and files say nothing of it) those of the packages alone.
    """
    if ours:
        return _listed(source, "--cached"), _listed(source, "--others", "--exclude-standard")
    paths = [path for package in _PACKAGES for path in (source / package).rglob("*") if path.is_file()]
    return [str(path.relative_to(source)) for path in paths if "__pycache__" not in path.parts], []


def _listed(source: Path, *which: str) -> list[str]:
    done = _git(source, "ls-files", "-z", *which)
    names = [] if done is None else os.fsdecode(done.stdout).split("\0")
    # Neither deleted ones, nor links to nowhere, nor repositories within this one.
    return [name for name in names if name and (source / name).is_file()]


def _outside(names: Sequence[str], source: Path, runs_dir: Path) -> list[str]:
    within = _runs_within(source, runs_dir)
    return [name for name in names if within is None or not Path(name).is_relative_to(within)]


def _runs_within(source: Path, runs_dir: Path) -> Path | None:
    """The runs folder as seen from the source, where it lies in there: its copies and checkpoints are no source."""
    try:
        return runs_dir.resolve().relative_to(source.resolve())
    except ValueError:
        return None


def _copy(source: Path, names: Sequence[str], beside: Path) -> Path:
    """The copy of these files as they are read: key and content are of the same moment."""
    beside.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".", dir=beside))
    try:
        digest = hashlib.sha256()
        for name in names:
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            digest.update(os.fsencode(name) + b"\0" + _copy_file(source / name, target))
        code = beside / digest.hexdigest()[:20]
        aside.chmod(0o755)
        if code.exists() and not _is_copy(code, names, aside):
            shutil.rmtree(code)  # somebody has changed it
        try:
            aside.rename(code)
        except OSError:
            if not code.exists():  # it has been there, or another launch was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return code


def _is_copy(code: Path, names: Sequence[str], again: Path) -> bool:
    _, different, missing = filecmp.cmpfiles(code, again, names, shallow=False)
    return not different and not missing


def _copy_file(path: Path, target: Path) -> bytes:
    """The digest of what was copied."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        try:
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    out.write(block)
                target.chmod(os.fstat(file.fileno()).st_mode & 0o777)
        except OSError as error:
            if error.filename != str(path):
                raise
            raise NotSubmittedError(
                f"{path}: it cannot be read ({error.strerror}), and the source is copied for the run. Nothing was "
                "started. Make it readable, or have git ignore it."
            ) from error
    return digest.digest()


def _patch(source: Path, untracked: Sequence[str], runs_dir: Path) -> str:
    """`git diff HEAD` with untracked files, through an index of its own: the real one stays as it is."""
    within = _runs_within(source, runs_dir)
    left_out = [] if within is None else [f":(exclude,literal){within}"]
    with tempfile.TemporaryDirectory() as folder:
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        index = Path(_told(source, "rev-parse", "--path-format=absolute", "--git-path", "index").strip())
        if index.exists():
            shutil.copy2(index, env["GIT_INDEX_FILE"])
        if untracked:
            add = ("--literal-pathspecs", "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
            _told(source, *add, env=env, stdin=b"\0".join(map(os.fsencode, untracked)))
        return _told(source, "diff", *_PLAIN_DIFF, *_PREFIXES, "HEAD", "--", ".", *left_out, env=env)


def _told(source: Path, *arguments: str, env: dict[str, str] | None = None, stdin: bytes = b"") -> str:
    """Output of a git that must not fail: without the difference the record of the code would be wrong."""
    done = _git(source, *arguments, env=env, stdin=stdin)
    if done is None or done.returncode != 0:
        last = "git is gone" if done is None else (os.fsdecode(done.stderr).strip().splitlines() or ["no reason"])[-1]
        raise NotSubmittedError(
            f"git cannot tell how {source} differs from its commit ({last}). Nothing was started. "
            f"See: git -C {source} fsck"
        )
    return os.fsdecode(done.stdout)
