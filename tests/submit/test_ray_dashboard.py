"""A job by the job API of a real Ray cluster of two hosts, which have nothing of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.project import Project, project
from tests.services.ray import ray_with_dashboard, why_no_dashboard
from tests.services.slurm import wait_until
from tests.waiting import HANG_S

pytestmark = [pytest.mark.stress, pytest.mark.skipif(why_no_dashboard() is not None, reason=str(why_no_dashboard()))]
STEPS = 12
SECRET = "hunter2-of-the-test"


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    with ray_with_dashboard() as address:
        yield address


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A user's folder, whose module imports a package from elsewhere."""
    (tmp_path / "elsewhere/its_package").mkdir(parents=True)
    (tmp_path / "elsewhere/its_package/__init__.py").write_text("WIDTH = 8\n")
    (tmp_path / "own").mkdir()
    made = project(tmp_path / "own")
    (made.folder / "own.py").write_text("import its_package\n" + (made.folder / "own.py").read_text())
    monkeypatch.setenv("OWN_PASSWORD", SECRET)
    return made


def submit(own: Project, dashboard: str, *overrides: str) -> str:
    here = ("--env", "OMP_NUM_THREADS=1", "--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OWN_PASSWORD")
    place = ("--to", "ray", "--dashboard", dashboard, "--py-module", "../elsewhere/its_package")
    done = own.shoal("submit", "run.toml", *place, "--nodes", "2", "--ranks-per-node", "1", "--json", *here, *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["id"]


def status(own: Project) -> dict[str, str]:
    done = own.shoal("submit", "status", "runs/own", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def log(own: Project) -> str:
    return own.shoal("submit", "logs", "runs/own").stdout


def until(own: Project, state: str) -> str:
    """Wait for the end of the job, which is to be in this state; the driver's last sentence."""
    wait_until(lambda: status(own)["state"] in ("done", "failed"), state, lambda: log(own), within_s=HANG_S)
    found = status(own)
    assert found["state"] == state, log(own)
    return found["sentence"]


def test_a_cluster_without_the_users_modules_gets_them_with_the_job(dashboard: str, own: Project) -> None:
    """The folder and the package are gone from here as soon as the job is taken: both hosts train to the end. Status
    and logs come from the cluster, which was told no secret."""
    from ray.job_submission import JobSubmissionClient

    identity = submit(own, dashboard, f"run.steps={STEPS}")
    (own.folder / "own.py").rename(own.folder / "own.py.gone")
    (own.folder.parent / "elsewhere").rename(own.folder.parent / "gone")
    assert until(own, "done") == "own: is done"
    assert max(own.losses()) == STEPS
    assert "own runs on 2 hosts" in log(own)
    told = JobSubmissionClient(dashboard).get_job_info(identity)
    assert SECRET not in str(told)
    assert told.runtime_env is not None
    assert told.runtime_env["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert not any(SECRET in path.read_text(errors="replace") for path in (own.folder / "runs/own/submit").iterdir())


def test_cancel_stops_the_job_after_its_ranks_have_saved(dashboard: str, own: Project) -> None:
    """Ray stops the driver, and waits for the save; a second cancel has nothing to do."""
    submit(own, dashboard, "run.steps=500", "model.arguments={pause=0.2}", "checkpoint.every_steps=1000")
    own.wait_for_step(2)
    assert own.shoal("submit", "cancel", "runs/own").returncode == 0
    assert until(own, "failed") == "cancelled; ranks that trained have saved"
    assert (own.folder / "runs/own/checkpoints/latest").exists()
    again = own.shoal("submit", "cancel", "runs/own")
    assert again.returncode == 2
    assert "there is nothing to cancel" in again.stderr
