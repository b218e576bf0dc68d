"""Being asked to stop: the signals, and never losing one between two processes or two handlers.

A watcher passes the signals on to its ranks; a rank starts with them blocked, so that none comes before it can
remember it. It must not import torch.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Asked:
    """Whether one of the signals came since this was made."""

    def __init__(self) -> None:
        self._came = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __call__(self) -> bool:
        return self._came


class Interrupts:
    """Counts Ctrl-C while the block lasts; none of them raises KeyboardInterrupt at a bad moment."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _add(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@contextmanager
def kept_for_the_child() -> Iterator[None]:
    """A process started in the block gets the signals only once it makes an Asked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
