"""Ray as a scheduler: a driver beside the run, which holds the job's actors (`ray_driver`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.config.load import dumps
from shoal.errors import EnvironmentFault, UsageError
from shoal.files import read_json
from shoal.submit.job import SubmittedJob
from shoal.submit.ray_driver import STATUS, DriverStatus, import_ray
from shoal.submit.ray_job import DESCRIPTION, RUN_FILE, Strategy, ray_job
from shoal.submit.scheduler import Status, Submission

LOG = "ray.log"
MOST_BYTES = 1 << 20
"""A status is a sentence."""
_DRIVER = "shoal.submit.ray_driver"


class Ray:
    """The Ray cluster at `address` ("auto": the one that this host belongs to)."""

    def __init__(self, address: str = "auto", *, strategy: Strategy = "STRICT_SPREAD", wait_s: float = 600.0) -> None:
        self._address, self._wait_s = address, wait_s
        self._strategy: Strategy = strategy

    def files(self, job: SubmittedJob) -> Mapping[str, str]:
        """The driver's description of the job, and the run file."""
        described = ray_job(job, address=self._address, strategy=self._strategy, wait_s=self._wait_s)
        text = msgspec.json.format(msgspec.json.encode(described), indent=2).decode() + "\n"
        return {DESCRIPTION: text, RUN_FILE: dumps(job.run_file)}

    def submit(self, job: SubmittedJob) -> Submission:
        """Start the driver, in a session of its own. Raises `MissingExtra`."""
        import_ray()
        (job.job_files / STATUS).unlink(missing_ok=True)
        with (job.job_files / LOG).open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", _DRIVER, str(job.job_files / DESCRIPTION)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Submission("ray", str(driver.pid), {"folder": str(job.job_files)})

    def status(self, submission: Submission) -> Status:
        """What the driver last wrote."""
        pid, path = int(submission.identity), Path(submission.where["folder"]) / STATUS
        alive = _is_driver(pid, submission)
        if not path.exists():
            return Status("waiting" if alive else "failed", "the driver starts" if alive else _gone(submission))
        last = read_json(path, DriverStatus, limit_bytes=MOST_BYTES, error=EnvironmentFault, repair="submit it again")
        if last.state in ("waiting", "running") and not alive:
            return Status("failed", _gone(submission))
        return Status(last.state, last.sentence)

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """`tail` on what the driver prints, the hosts' output among it."""
        path = Path(submission.where["folder"]) / LOG
        return ["tail", "-n", "+1", str(path)] if path.exists() else []

    def cancel(self, submission: Submission) -> None:
        """SIGTERM to the driver, which has the ranks save. Raises `UsageError` where the job is over."""
        found = self.status(submission)
        if found.state in ("done", "failed"):
            raise UsageError(f"{found.sentence}: there is nothing to cancel")
        os.kill(int(submission.identity), signal.SIGTERM)


def _is_driver(pid: int, submission: Submission) -> bool:
    """Whether the process is this job's driver still: numbers of processes are given again."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return _DRIVER in words and any(word.startswith(submission.where["folder"]) for word in words)


def _gone(submission: Submission) -> str:
    return f"the driver, process {submission.identity}, is gone from this host"
