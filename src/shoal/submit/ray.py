"""Ray as a scheduler: a driver beside the run, which holds the job's actors (`ray_driver`)."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal.config.load import dumps_set
from shoal.errors import EnvironmentFault, MissingExtra, UsageError
from shoal.files import read_json, temporary_folder
from shoal.submit.job import SubmittedJob
from shoal.submit.ray_driver import STATUS, DriverStatus, import_ray
from shoal.submit.ray_job import DESCRIPTION, RUN_FILE, Strategy, ray_job
from shoal.submit.scheduler import State, Status, Submission
from shoal.units import byte_size

LOG = "ray.log"
MOST_LOCAL_BYTES = 1 << 20
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
        return {DESCRIPTION: text, RUN_FILE: dumps_set(job.run_file)}

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
        last = read_json(
            path, DriverStatus, limit_bytes=MOST_LOCAL_BYTES, error=EnvironmentFault, repair="submit it again"
        )
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


# Ray's own job API: the driver runs in the cluster, which gets the user's code with the job.
#
#     submit    the folder, without what runs and tools leave in it, goes to the cluster as the job's working directory,
#               with the run file and the job's description; the driver, its actors and their ranks start there
#     status    the cluster's word, and the driver's last sentence from its log
#     cancel    SIGTERM to the driver, which has the ranks save; Ray waits as long as they may take
#
# The run directory is the same absolute path on all hosts. Variables of the job go along; secrets do not: the driver
# takes them from the cluster's environment.


MOST_BYTES = 200 << 20
"""Of the folder that is sent; Ray itself refuses 500 MiB."""
SENT = ".shoal-job"
"""Where the job's files lie in the working directory."""
LEFT_OUT = (
    ".git",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
    "runs",
    "sweeps",
    SENT,
)
_KNOCK_S = 10.0
_STATES: dict[str, State] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "STOPPED": "failed",
}


class RayJobs:
    """The cluster whose dashboard is at `dashboard`, an address of HTTP. `py_modules`: folders of modules beside the
    job's own that the ranks import. Raises `UsageError` where `dashboard` is no such address.
    """

    def __init__(
        self,
        dashboard: str,
        *,
        strategy: Strategy = "STRICT_SPREAD",
        wait_s: float = 600.0,
        py_modules: Sequence[Path] = (),
    ) -> None:
        self._dashboard, self._wait_s, self._py_modules = _checked(dashboard), wait_s, tuple(py_modules)
        self._strategy: Strategy = strategy

    def files(self, job: SubmittedJob) -> Mapping[str, str]:
        """The driver's description of the job, and the run file, as the cluster gets them."""
        command = job.host_command(f"{SENT}/{RUN_FILE}", directory=str(job.directory), python="python")
        described = ray_job(job, address="auto", strategy=self._strategy, wait_s=self._wait_s)
        described = msgspec.structs.replace(described, command=command, folder="")
        text = msgspec.json.format(msgspec.json.encode(described), indent=2).decode() + "\n"
        run = msgspec.structs.replace(job.run_file.run, directory=str(job.directory))
        return {DESCRIPTION: text, RUN_FILE: dumps_set(msgspec.structs.replace(job.run_file, run=run))}

    def submit(self, job: SubmittedJob) -> Submission:
        """Send the folder and start the driver. Raises `UsageError` for a folder of more than `MOST_BYTES`."""
        client = _client(self._dashboard)
        missing = next((path for path in self._py_modules if not path.is_dir()), None)
        if missing is not None:
            raise UsageError(f"--py-module {missing} is no folder: give the folder of a package")
        with temporary_folder() as folder, _asked(self._dashboard, "did not take the job"):
            _copy(job, folder / "job")
            # The driver asks the ranks to save when it is stopped; Ray's own patience is 3 s.
            patience = {"RAY_JOB_STOP_WAIT_TIME_S": str(job.resources.save_s)}
            identity = client.submit_job(
                entrypoint=f"python -m shoal.submit.ray_driver {SENT}/{DESCRIPTION}",
                runtime_env={
                    "working_dir": str(folder / "job"),
                    "env_vars": {**job.variables, **patience},
                    **({"py_modules": [str(path.absolute()) for path in self._py_modules]} if self._py_modules else {}),
                },
                metadata={"shoal_run": job.name},
            )
        return Submission("ray", str(identity), {"dashboard": self._dashboard})

    def status(self, submission: Submission) -> Status:
        """The cluster's state of the job, and what its driver said last; "unknown" where the cluster forgot it."""
        client = _client(self._dashboard)
        with _asked(self._dashboard, "did not say how the job stands"):
            if all(known.submission_id != submission.identity for known in client.list_jobs()):
                return Status("unknown", f"the cluster at {self._dashboard} knows no job {submission.identity}")
            info = client.get_job_info(submission.identity)
            told = client.get_job_logs(submission.identity)
        said = [line.removeprefix("shoal: ") for line in told.splitlines() if line.startswith("shoal: ")]
        state = _STATES[str(getattr(info.status, "value", info.status))]
        ended_unsaid = state in ("done", "failed") and not said
        sentence = str(info.message).strip() if ended_unsaid or not said else said[-1]
        return Status(state, sentence or f"{submission.identity} is {state}")

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """Ray's own `ray job logs`, which takes `-f` too."""
        ray = (sys.executable, "-m", "ray.scripts.scripts")
        return [*ray, "job", "logs", "--address", self._dashboard, submission.identity]

    def cancel(self, submission: Submission) -> None:
        """Have Ray stop the driver. Raises `UsageError` where the job is over."""
        found = self.status(submission)
        if found.state in ("done", "failed", "unknown"):
            raise UsageError(f"{found.sentence}: there is nothing to cancel")
        with _asked(self._dashboard, "did not stop the job"):
            _client(self._dashboard).stop_job(submission.identity)


def _checked(dashboard: str) -> str:
    parts = urlsplit(dashboard)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--dashboard {dashboard[:80]!r} is no address of a Ray dashboard: write http://HOST:8265")
    return dashboard.rstrip("/")


def _client(dashboard: str) -> Any:
    """Ray's client of the dashboard. Raises `MissingExtra`, and `EnvironmentFault` where none answers."""
    try:
        jobs = importlib.import_module("ray.job_submission")
        importlib.import_module("aiohttp")
    except ImportError:
        raise MissingExtra("ray[default]", extra="ray", purpose="a job by Ray's dashboard") from None
    parts = urlsplit(dashboard)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:  # Ray's own client waits without limit
        socket.create_connection((str(parts.hostname), port), timeout=_KNOCK_S).close()
    except OSError as error:
        raise EnvironmentFault(
            f"no Ray dashboard answers at {dashboard} ({error}): start the cluster (ray start --head, with "
            "ray[default] installed), or give the address that it printed with --dashboard"
        ) from None
    with _asked(dashboard, "is no Ray dashboard with a job API, or one of another version"):
        return jobs.JobSubmissionClient(dashboard)


@contextmanager
def _asked(dashboard: str, failed: str) -> Iterator[None]:
    """What Ray's client raises becomes an `EnvironmentFault`."""
    try:
        yield
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:400] or type(error).__name__
        raise EnvironmentFault(f"the cluster at {dashboard} {failed} ({said})") from None


def _copy(job: SubmittedJob, target: Path) -> None:
    """The user's folder and the job's files, as the cluster gets them. Raises `UsageError` where that is too much."""
    sizes = {path: path.stat().st_size for path in _sent(job)}
    if sum(sizes.values()) > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        listed = ", ".join(f"{path.relative_to(job.folder)} with {byte_size(sizes[path])}" for path in largest)
        raise UsageError(
            f"{job.folder} has {byte_size(sum(sizes.values()))}, and at most {byte_size(MOST_BYTES)} go to the cluster "
            f"with a job ({listed}): keep data elsewhere, under a path that the hosts share, or submit from a smaller "
            "folder"
        )
    for path in sizes:
        copy = target / path.relative_to(job.folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    shutil.copytree(job.job_files, target / SENT)


def _sent(job: SubmittedJob) -> Iterator[Path]:
    """The files of the folder, without the run's own, virtual environments, and what `LEFT_OUT` names."""
    for name, folders, files in os.walk(job.folder):
        folder = Path(name)
        folders[:] = [
            one
            for one in folders
            if one not in LEFT_OUT and folder / one != job.directory and not (folder / one / "pyvenv.cfg").exists()
        ]
        yield from (folder / one for one in files if (folder / one).is_file())
