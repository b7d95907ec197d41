"""What users read before a job gets to Ray's job API, and what of their folder goes along."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.submit import ray
from shoal.submit.job import SubmittedJob
from shoal.submit.ray import RayJobs
from shoal.submit.ray_job import DESCRIPTION, RUN_FILE, RayJob
from shoal.submit.scheduler import Submission, write_files
from tests.cli.project import project
from tests.services.ray import why_not
from tests.submit.jobs import job

NOWHERE = "http://127.0.0.1:1"


class _Stranger(BaseHTTPRequestHandler):
    """A server of something else."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def made(tmp_path: Path) -> SubmittedJob:
    return job("replicas", tmp_path / "own")


@pytest.fixture
def stranger() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_is_no_dashboard_is_a_sentence(made: SubmittedJob, stranger: str) -> None:
    """An address of another kind, one where nothing listens, and a server of something else."""
    for address in ("10.0.0.1:6379", "ray://10.0.0.1:10001", "http://", "auto"):
        with pytest.raises(UsageError, match="is no address of a Ray dashboard: write http://HOST:8265"):
            RayJobs(address)
    if why_not() is not None:
        pytest.skip(str(why_not()))
    pytest.importorskip("aiohttp")
    with pytest.raises(EnvironmentFault, match=r"no Ray dashboard answers at http://127.0.0.1:1 .*ray start --head"):
        RayJobs(NOWHERE).submit(made)
    with pytest.raises(EnvironmentFault, match="is no Ray dashboard with a job API"):
        RayJobs(stranger).submit(made)
    gone = Submission("ray", "raysubmit_1", {"dashboard": NOWHERE})
    for ask in (RayJobs(NOWHERE).status, RayJobs(NOWHERE).cancel):
        with pytest.raises(EnvironmentFault, match="no Ray dashboard answers"):
            ask(gone)


def test_options_of_the_job_api_elsewhere_are_refused(tmp_path: Path) -> None:
    """With another scheduler, and modules without a dashboard: nothing is written."""
    own = project(tmp_path)
    for options in (("slurm", "--dashboard", NOWHERE), ("ray", "--py-module", "here")):
        refused = own.here("submit", "run.toml", "--ranks-per-node", "1", "--to", *options)
        assert refused.returncode == 2, options
    assert not (tmp_path / "runs").exists()


def test_the_cluster_gets_files_that_say_nothing_of_this_host_but_the_run_directory(made: SubmittedJob) -> None:
    """Commands start in the job's working directory, with the cluster's own Python."""
    files = RayJobs(NOWHERE).files(made)
    described = msgspec.json.decode(files[DESCRIPTION].encode(), type=RayJob)
    assert (described.folder, described.address, described.command[0]) == ("", "auto", "python")
    assert described.command[-1] == ".shoal-job/run.toml"
    assert f'directory = "{made.directory}"' in files[RUN_FILE]


def test_what_goes_along_is_the_folder_without_runs_and_environments(
    made: SubmittedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules, packages and data go; runs, `.git`, caches and virtual environments stay; the job's files are added. A
    folder that is too large is refused with its largest files."""
    for name in ("own.py", "package/__init__.py", "data/corpus.txt", ".git/config", "env/pyvenv.cfg", "env/lib/big.so",
                 "package/__pycache__/x.pyc", "runs/other/log"):  # fmt: skip
        path = made.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    write_files(made, RayJobs(NOWHERE).files(made))
    (made.directory / "checkpoint").write_text("weights")
    (made.folder / "dangling").symlink_to("nowhere")
    ray._copy(made, target := tmp_path / "sent")
    sent = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert sent == sorted(
        ["own.py", "package/__init__.py", "data/corpus.txt", ".shoal-job/ray-job.json", ".shoal-job/run.toml"]
    )
    monkeypatch.setattr(ray, "MOST_BYTES", 20)
    with pytest.raises(UsageError, match=r"at most 20 B .*package/__init__.py with 19 B, data/corpus.txt with"):
        ray._copy(made, tmp_path / "too-much")
    assert not (tmp_path / "too-much").exists()
