"""The exceptions that Shoal raises on purpose, and the exit code of each.

    ShoalError                     1
     ├── UsageError                2   the run file, the command line or the user's own code is wrong
     │    ├── ConfigError              a key of the run file
     │    ├── LayoutError              a layout that cannot be
     │    ├── DataError                a data file or a sample
     │    └── UserCodeError            a function of the user's that is missing or returns the wrong thing
     ├── EnvironmentFault          3   the machine is: ports, devices, disks, missing extras
     │    ├── MissingExtra
     │    ├── InUse                    a run directory or a port that somebody else holds
     │    └── CollectiveError          a rank that is dead, stopped or late
     │         └── GenerationOver      a replica of an elastic run was lost: another generation follows
     ├── Diverged                  4
     ├── OutOfMemory               5
     ├── VerificationFailed        6
     │    └── CorruptCheckpoint
     ├── Stopped                  75   a signal, after a good checkpoint: start it again
     └── RunEnded                      what `shoal.train` raises in a script
          ├── RunFailed                the code of the refusal, or of the first rank that failed
          └── RunStopped               75 or 128+n: a signal

`docs/reference/exit-codes.md` promises the codes. A message says what was found, the rule, and the repair, in that
order. The `shoal` command shows it without a traceback.
"""

from __future__ import annotations

from shoal.installation import install_command


class ShoalError(Exception):
    """Base of everything Shoal raises on purpose."""

    exit_code = 1


class UsageError(ShoalError):
    """The run file, the command line or the user's own code is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A key of the run file is unknown, mistyped, missing or impossible beside another."""


class LayoutError(UsageError):
    """A layout whose axes do not fit the world, the model or each other."""


class DataError(UsageError):
    """A data file or a sample that cannot be used as it is."""


class UserCodeError(UsageError):
    """A function named in the run file is missing, raises, or returns the wrong thing."""


class EnvironmentFault(ShoalError):
    """The machine, not the run file, stands in the way."""

    exit_code = 3


class MissingExtra(EnvironmentFault):
    """An optional package is needed; the message names the extra that brings it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': {install_command(extra)}")


class InUse(EnvironmentFault):
    """A run directory or a port is held by another process."""


class CollectiveError(EnvironmentFault):
    """A collective could not complete: a rank is dead, stopped or late."""


class GenerationOver(CollectiveError):
    """A generation of an elastic run takes no further step: a replica was lost, and another generation follows."""


class Diverged(ShoalError):
    """Losses or gradients stayed non-finite."""

    exit_code = 4


class OutOfMemory(ShoalError):
    """A device or the host ran out of memory."""

    exit_code = 5


class VerificationFailed(ShoalError):
    """Something that was checked does not hold."""

    exit_code = 6


class CorruptCheckpoint(VerificationFailed):
    """A checkpoint whose bytes are not those that were written."""


class Stopped(ShoalError):
    """A signal asked the run to stop, and a verified checkpoint was written."""

    exit_code = 75


class RunEnded(ShoalError, SystemExit):
    """A run that `shoal.train` was asked for has ended without success; what was wrong is on standard error.

    `exit_code` is the run's, `rank` the rank that caused it (None: no rank did), `sentence` what was wrong. A script
    that does not catch it ends with that code, without a traceback.
    """

    def __init__(self, exit_code: int, *, rank: int | None, sentence: str) -> None:
        super().__init__(f"the run ended with exit code {exit_code}: {sentence}")
        self.exit_code = self.code = exit_code
        self.rank = rank
        self.sentence = sentence


class RunFailed(RunEnded):
    """The run was refused, then its `__cause__` says why by its type, or a rank failed."""


class RunStopped(RunEnded):
    """A signal stopped the run: after a good checkpoint (75), or at once (128 + n)."""
