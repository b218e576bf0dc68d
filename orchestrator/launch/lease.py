"""Leases of devices and CPU slots on one machine, first come first served, without a daemon.

Takes ids and how many are wanted, gives them while the process lives: a lease is a flock on a file, so the kernel
takes it back however the holder dies. Waiting runs hold a ticket; only the oldest may lease.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import NotSubmittedError

_POLL_S = 0.1


def default_folder() -> Path:
    """One folder a machine, for all its users and whatever their TMPDIR: else two queues lease the same device."""
    return Path("/tmp/orchestrator-leases")


def folder_of(lease_dir: str | None) -> Path:
    """The folder of launch.lease_dir, made where it is missing; raises NotSubmittedError where that fails."""
    folder = default_folder() if lease_dir is None else Path(lease_dir).expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotSubmittedError(
            f"launch.lease_dir={lease_dir or 'null'}: {folder} cannot be written ({error.strerror}). Nothing was "
            "started. Set launch.lease_dir to a folder that you can write."
        ) from error
    return folder


def _make(folder: Path) -> None:
    """A folder for all users: whoever makes it, makes it theirs too."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o777)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a run was given, while the block of `lease` lasts."""

    ids: tuple[str, ...]
    """Ids of devices or slots."""
    descriptors: tuple[int, ...]
    """Open files that hold them. A process that inherits these holds the lease too, until it is gone."""


class StoppedWaitingError(Exception):
    """The run was asked to stop while it was queued."""


@contextmanager
def lease(
    ids: Sequence[str],
    count: int,
    *,
    folder: Path,
    submitted_at: float,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Lease]:
    """Wait for the turn and for `count` free ids, hold them inside the block.

    `submitted_at`, seconds since the epoch, is the place in the queue. Raises StoppedWaitingError.
    """
    assert 0 < count <= len(ids)
    folder.mkdir(parents=True, exist_ok=True)
    queue = folder / f"queue-{ids[0].partition(':')[0]}"  # those who wait for GPUs hold up no CPU run
    _make(queue)
    ticket = queue / f"{int(submitted_at * 1e6):020d}-{os.getpid()}"
    unnamed = queue / f".{ticket.name}"  # locked before others can see it
    ticket_lock = _lock(unnamed)
    assert ticket_lock is not None
    unnamed.rename(ticket)
    held: dict[str, int] = {}
    try:
        while not held:
            if stop_requested():
                raise StoppedWaitingError
            if _is_first(ticket):
                held = _take(ids, count, folder)
            if not held:
                time.sleep(_POLL_S)
        ticket.unlink(missing_ok=True)
        yield Lease(ids=tuple(held), descriptors=tuple(held.values()))
    finally:
        ticket.unlink(missing_ok=True)
        os.close(ticket_lock)
        for descriptor in held.values():
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the file's lock, None where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)  # another user's can be locked too
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_first(ticket: Path) -> bool:
    """Whether no older ticket has a living holder; dead ones are cleared away."""
    for other in sorted(path for path in ticket.parent.iterdir() if not path.name.startswith(".")):
        if other.name >= ticket.name:
            return True
        descriptor = _lock(other)
        if descriptor is None:
            return False
        other.unlink(missing_ok=True)
        os.close(descriptor)
    return True


def _take(ids: Sequence[str], count: int, folder: Path) -> dict[str, int]:
    """`count` ids with their locks, or none at all."""
    held: dict[str, int] = {}
    for name in ids:
        descriptor = _lock(folder / name.replace("/", "_"))
        if descriptor is not None:
            held[name] = descriptor
        if len(held) == count:
            return held
    for descriptor in held.values():
        os.close(descriptor)
    return {}
