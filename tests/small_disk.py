"""Disks that are small or cannot be written, mounted for a test; needs root, so such tests are skipped without."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(folder: Path, *arguments: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() != 0:
        pytest.skip("mounting a disk needs root")
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")


@contextmanager
def small_disk(folder: Path, size_bytes: int, *options: str) -> Iterator[Path]:
    """A disk of this size in memory, mounted there."""
    _mount(folder, "-t", "tmpfs", "-o", ",".join((f"size={size_bytes}", *options)), "tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only_disk(folder: Path) -> Iterator[Path]:
    """An empty disk that nobody can write, root included."""
    with small_disk(folder, 64 << 20, "ro"):
        yield folder


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """A file that takes the room of this disk but for so many bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    os.truncate(filler, filler.stat().st_size - leave_bytes)
    return filler
