"""What a user is told when something is wrong: one message, one exit code, no traceback.

Takes Problems or text, gives exceptions that only `cli.py` catches.
"""

from collections.abc import Sequence
from enum import IntEnum

from train.spec import Problem


class ExitCode(IntEnum):
    """Exit codes of the program; scripts rely on them."""

    DONE = 0
    CONFIG_ERROR = 2
    DOES_NOT_FIT = 3
    CANNOT_TELL = 4
    OVER_BUDGET = 5
    NOT_SUBMITTED = 6
    RUN_FAILED = 7


class OrchestratorError(Exception):
    """Ends the program with its message and its exit code."""

    exit_code = ExitCode.NOT_SUBMITTED


class ConfigError(OrchestratorError):
    """All that is wrong with a config, together."""

    exit_code = ExitCode.CONFIG_ERROR

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in problems]
        head = [] if len(lines) == 1 else [f"{len(lines)} errors in the config:"]
        super().__init__("\n".join(head + lines))


class NotSubmittedError(OrchestratorError):
    """Nothing was started; the message says why and what to set."""

    exit_code = ExitCode.NOT_SUBMITTED


class RunFailedError(OrchestratorError):
    """A run that was started failed."""

    exit_code = ExitCode.RUN_FAILED
