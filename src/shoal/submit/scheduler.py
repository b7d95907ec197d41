"""What every scheduler does with a job, and the record that lies beside a run of what was submitted.

runs/NAME/submit/   run.toml            the keys that are set, overrides among them
                    job.sbatch, ...     what the scheduler was given
                    submission.json     to whom, and under which name it knows the job
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from shoal.errors import EnvironmentFault, UsageError
from shoal.files import read_file
from shoal.submit.job import SubmittedJob

# Calls of a scheduler's client program (`sbatch`, `kubectl`), bounded in time.


CALL_S = 60.0
_LOGGED = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\]")
"""A line of klog, which kubectl writes about each of its attempts."""
_FATAL = ": fatal: "


def call(command: Sequence[str], *, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a client to its end, `text` on its standard input; whatever its exit code.

    Raises `EnvironmentFault` where the program is missing or does not answer within `CALL_S`.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise EnvironmentFault(
            f"{program} is not on the PATH: submitting needs the scheduler's own client; "
            "call shoal on a host that has it, or write the job files alone with --dry-run"
        )
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=CALL_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"{program} did not answer within {CALL_S:.0f} s: see whether the scheduler runs, then try again"
        ) from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What the client complained of, in one line of at most 400 characters: what kubectl logs beside its complaint is
    left out, and what Slurm's clients report before what ended them.
    """
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    told = [line for line in lines if not _LOGGED.match(line)] or lines
    ended = [line for line in told if _FATAL in line] or told
    return " ".join(" ".join(ended).split())[:400] or f"exit code {done.returncode}, without a word"


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


# Following a job that was submitted: how it stands while it waits, what it prints while it runs, how it ends.


LOOK_S = 2.0
_ENDED = ("done", "failed")


def follow(
    scheduler: Scheduler, submission: Submission, directory: Path, *, say: Callable[[str], None], look_s: float = LOOK_S
) -> Status:
    """Until the job has ended: its last status. A sentence goes to `say` when it changes before anything is printed;
    what the job prints goes to standard output."""
    told, printing = "", None
    try:
        while True:
            found = scheduler.status(submission)
            if printing is None and found.sentence != told:
                told = found.sentence
                say(told)
            over = found.state in _ENDED or (found.state == "unknown" and printing is not None)
            if printing is None and (command := scheduler.log_command(submission, directory)):
                if over:
                    subprocess.run(command, check=False)  # all of it is there
                elif found.state == "running":
                    printing = subprocess.Popen([*command, "-f"])
            if over or found.state == "unknown":
                return found
            time.sleep(look_s)
    finally:
        if printing is not None:
            time.sleep(min(look_s, 1.0))  # its last lines
            printing.terminate()
            printing.wait()
