"""The source as it is at launch: a copy that the ranks import, the commit, and the patch of a dirty tree.

Takes the project's folder, gives a Frozen. The copy holds what git tracks and what it does not ignore, is keyed by
its content, built aside and renamed.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("orchestrator", "train", "conf")


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A copy of the source and where it came from."""

    code: Path
    commit: str | None
    patch: str
    """Difference to the commit, untracked files included; empty for a clean tree or outside git."""


def freeze(source: Path, runs_dir: Path) -> Frozen:
    """Copy `source` to runs_dir/.code/<key>, unless the same content is there; raises OSError."""
    files = _files(source)
    digest = hashlib.sha256()
    for name in files:
        content = (source / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    code = runs_dir / ".code" / digest.hexdigest()[:20]
    if not code.exists():
        _copy(source, files, code)
    commit = _git(source, "rev-parse", "HEAD")
    return Frozen(
        code=code,
        commit=None if commit is None else commit.strip(),
        patch=_patch(source) if commit is not None else "",
    )


def _git(source: Path, *arguments: str, env: dict[str, str] | None = None) -> str | None:
    """Output of git, None where it fails: no git, no repository, no commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments],
            capture_output=True,
            check=False,
            env=None if env is None else os.environ | env,
        )
    except FileNotFoundError:
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _files(source: Path) -> list[str]:
    listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed:
        names = [name for name in listed.split("\0") if name]
        if "orchestrator/__init__.py" in names:
            return sorted(n for n in set(names) if (source / n).is_file())
    # Installed as a package, or no git at hand: the packages themselves.
    paths = [path for package in _PACKAGES for path in (source / package).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(source)) for path in paths if "__pycache__" not in path.parts)


def _copy(source: Path, files: list[str], code: Path) -> None:
    code.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".", dir=code.parent))
    try:
        for name in files:
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target)
        try:
            aside.rename(code)
        except OSError:
            if not code.exists():  # another launch made the same copy, and was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _patch(source: Path) -> str:
    """`git diff HEAD` with untracked files, through an index of its own: the real one stays as it is."""
    index = _git(source, "rev-parse", "--path-format=absolute", "--git-path", "index")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "index"
        if index is not None and Path(index.strip()).exists():
            shutil.copy2(index.strip(), copy)
        env = {"GIT_INDEX_FILE": str(copy)}
        _git(source, "add", "--intent-to-add", "--", ".", env=env)
        return _git(source, "diff", "HEAD", "--binary", "--", ".", env=env) or ""
