"""What every scheduler does with a job, and the record that lies beside a run of what was submitted.

runs/NAME/submit/   run.toml            resolved, as the ranks read it
                    job.sbatch, ...     what the scheduler was given
                    submission.json     to whom, and under which name it knows the job
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from shoal.errors import UsageError
from shoal.files import read_file
from shoal.submit.job import SubmittedJob

To = Literal["slurm", "kubernetes", "ray"]
State = Literal["waiting", "running", "done", "failed", "unknown"]
RECORD = "submission.json"
_MOST_BYTES = 1 << 16


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job that a scheduler has taken: the scheduler, its name for the job, and what it takes to ask for it again."""

    to: To
    identity: str
    where: dict[str, str] = {}


@dataclass(frozen=True)
class Status:
    """How a job stands, in a word and in a sentence."""

    state: State
    sentence: str


class Scheduler(Protocol):
    """Writes a job down and hands it over. All methods raise `EnvironmentFault` where the scheduler cannot be asked."""

    def files(self, job: SubmittedJob) -> Mapping[str, str]:
        """The job files, text by name. Raises `UsageError` for a job that the scheduler cannot hold."""
        ...

    def submit(self, job: SubmittedJob) -> Submission:
        """Hand over the job, whose files are written."""
        ...

    def status(self, submission: Submission) -> Status:
        """How the job stands."""
        ...

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """The command that follows what the job prints; empty where it has printed nothing."""
        ...

    def cancel(self, submission: Submission) -> None:
        """End the job; ranks get SIGTERM first, and save."""
        ...


def write_files(job: SubmittedJob, files: Mapping[str, str]) -> None:
    """Put the job files beside the run."""
    job.job_files.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (job.job_files / name).write_text(text, encoding="utf-8")


def write_record(job: SubmittedJob, submission: Submission) -> None:
    """Note what was submitted."""
    (job.job_files / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(submission), indent=2) + b"\n")


def read_record(directory: Path) -> Submission:
    """What was submitted from the run directory last. Raises `UsageError` where nothing was."""
    path = directory / "submit" / RECORD
    content = read_file(path, limit_bytes=_MOST_BYTES, error=UsageError, repair="give the directory of a submitted run")
    try:
        return msgspec.json.decode(content, type=Submission)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no record of a submission ({error}): submit the run again") from None
