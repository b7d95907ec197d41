"""Jobs on a real Slurm of three hosts: time limits, drained and missing hosts, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.data.order import Order
from tests.cli.project import Project, project
from tests.services.slurm import SlurmCluster, slurm_cluster, wait_until, why_not
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
STEPS, SAMPLES_A_STEP = 12, 5
# Host names of the cluster are names only: all of its hosts meet on this one.
HERE = ("--env", "MASTER_ADDR=127.0.0.1", "--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A user's folder, in a shell whose Slurm is this cluster."""
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    return project(tmp_path)


def submit(own: Project, *options: str, nodes: int = 2) -> str:
    """Submit to as many hosts of one rank each; the job's number."""
    done = own.shoal("submit", "run.toml", "--to", "slurm", "--nodes", str(nodes), "--ranks-per-node", "1", *HERE,
                     "--json", *options)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["id"]


def status(own: Project) -> dict[str, str]:
    done = own.shoal("submit", "status", "runs/own", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def log(own: Project, identity: str) -> str:
    """What the job has printed."""
    path = own.folder / f"runs/own/submit/slurm-{identity}.log"
    return path.read_text() if path.exists() else ""


def field(cluster: SlurmCluster, identity: str, name: str) -> str:
    """One of the job's fields, as Slurm shows it."""
    shown = dict(pair.partition("=")[::2] for pair in cluster.call("scontrol", "-o", "show", "job", identity).split())
    return shown[name]


def used(own: Project) -> list[int]:
    """The samples that the model saw, step by step, and in a step by rank."""
    lines = [json.loads(line) for line in (own.folder / "used.jsonl").read_text().splitlines()]
    return [sample for line in sorted(lines, key=lambda line: (line["step"], line["rank"])) for sample in line["ids"]]


def wait_for_requeue(cluster: SlurmCluster, own: Project, identity: str, *, within_s: float = HANG_S) -> None:
    """Until the job was queued again; it starts once its old credentials have expired (`cred_expire`)."""
    wait_until(
        lambda: int(field(cluster, identity, "Restarts")) > 0,
        "the requeue",
        lambda: log(own, identity) + cluster.log(),
        within_s=within_s,
    )


def ended(cluster: SlurmCluster, own: Project, identity: str, *, within_s: float = HANG_S) -> str:
    """The state in which the job ended."""
    wait_until(
        lambda: field(cluster, identity, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
        "the job's end",
        lambda: log(own, identity) + cluster.log(),
        within_s=within_s,
    )
    return field(cluster, identity, "JobState")


@pytest.mark.stress
def test_a_stopped_job_goes_on_elsewhere_with_every_sample_once(cluster: SlurmCluster, own: Project) -> None:
    """SIGTERM as before a time limit, and one of the two hosts drained: the ranks save and leave with 75, the job is
    queued again, goes on from its step on the hosts that are left, and the samples are those of a run never stopped."""
    identity = submit(own, f"run.steps={STEPS}", "model.arguments={pause=0.5}")
    own.wait_for_step(3)
    assert status(own)["sentence"].startswith(f"job {identity} runs on n[1-2] for ")
    cluster.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        cluster.call("scancel", "--signal=TERM", identity)
        wait_for_requeue(cluster, own, identity)
        assert ended(cluster, own, identity) == "COMPLETED", log(own, identity)
        assert field(cluster, identity, "NodeList") == "n[1,3]"
    finally:
        cluster.call("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert status(own) == {
        "id": identity, "state": "done", "sentence": f"job {identity} is done, started again 1 time"
    }  # fmt: skip
    assert "resumed after step" in log(own, identity)
    assert used(own) == Order(30, seed=0).ids(np.arange(STEPS * SAMPLES_A_STEP)).tolist()
    shown = own.shoal("submit", "logs", "runs/own")
    assert f"own: {STEPS} steps, resumed after step" in shown.stdout


def test_a_missing_host_starts_no_rank_and_says_so(cluster: SlurmCluster, own: Project) -> None:
    """Three hosts asked for, one of them lost: no rank starts, and `status` says for what the job waits; `cancel` ends
    it."""
    with cluster.without("n3"):
        identity = submit(own, nodes=3)
        wait_until(lambda: field(cluster, identity, "Reason") not in ("None", ""), "a reason", cluster.log)
        found = status(own)
        assert found["state"] == "waiting"
        assert "no rank has started" in found["sentence"]
        assert "all hosts start together" in found["sentence"]
        assert own.shoal("submit", "logs", "runs/own").stdout.startswith("nothing yet: ")
        assert own.shoal("submit", "cancel", "runs/own").returncode == 0
        assert ended(cluster, own, identity) == "CANCELLED"
    assert not (own.folder / "used.jsonl").exists()


def test_a_cancelled_job_saves_and_does_not_come_back(cluster: SlurmCluster, own: Project) -> None:
    """`cancel` in the middle: the ranks save, and leave with 75 without a requeue."""
    identity = submit(own, "run.steps=500", "model.arguments={pause=0.3}", "checkpoint.every_steps=1000")
    own.wait_for_step(2)
    assert own.shoal("submit", "cancel", "runs/own").returncode == 0
    assert ended(cluster, own, identity) == "CANCELLED"
    assert field(cluster, identity, "Restarts") == "0"
    wait_until(lambda: "stopped after a good checkpoint" in log(own, identity), "the save", lambda: log(own, identity))
    assert (own.folder / "runs/own/checkpoints/latest").exists()


@pytest.mark.stress
def test_a_failed_rank_ends_the_job_with_its_code_and_is_named(cluster: SlurmCluster, own: Project) -> None:
    """A mistake in the user's module on rank 1: the job fails, does not start again, and its log names rank 1 of 2."""
    identity = submit(own, "model.arguments={fail_at=2}")
    assert ended(cluster, own, identity) == "FAILED"
    assert field(cluster, identity, "Restarts") == "0"
    assert "rank 1 of 2 failed" in log(own, identity)
    assert "ArithmeticError: a mistake in the user's own module" in log(own, identity)
    assert status(own)["state"] == "failed"


def test_what_the_cluster_has_not_is_refused_in_a_sentence(own: Project) -> None:
    """No such partition: 2, and those that there are. More hosts, or cores on a host, than there are: 3, and what there
    is. Nothing is recorded."""
    base = ("submit", "run.toml", "--to", "slurm", "--ranks-per-node", "1")
    done = own.shoal(*base, "--nodes", "2", "--partition", "gpu")
    assert (done.returncode, done.stderr) == (
        2,
        "shoal: there is no partition gpu in this cluster: it has main; give one of them with --partition\n",
    )
    for options in (("--nodes", "5"), ("--nodes", "2", "--cpus", "64")):
        done = own.shoal(*base, *options)
        assert done.returncode == 3
        assert done.stderr.startswith("shoal: the cluster cannot hold the job (")
        assert "there are main: 3 hosts of 4 cores" in done.stderr
    assert own.shoal("submit", "status", "runs/own").returncode == 2


@pytest.mark.stress
def test_srun_with_a_task_a_rank_trains(cluster: SlurmCluster, own: Project) -> None:
    """Without a launcher on the hosts: Slurm starts the ranks, which prove to each other the token of their user."""
    state = own.folder / "state"
    here = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "XDG_STATE_HOME": str(state)}
    done = subprocess.run(
        ["srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "shoal", "train", "run.toml"],
        cwd=own.folder, env={**own.environ(**here), **cluster.environ}, capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert used(own) == Order(30, seed=0).ids(np.arange(9 * SAMPLES_A_STEP)).tolist()
    assert (state / "shoal/token").stat().st_mode & 0o777 == 0o600


@pytest.mark.stress
def test_a_real_time_limit_stops_saves_and_goes_on(cluster: SlurmCluster, own: Project) -> None:
    """Slurm's own signal before its own time limit: the run takes longer, is stopped at least once, and uses every
    sample once, in the order of a run without limits. Slurm sends the signal up to a minute early: of two minutes, 40
    to 100 s are left; of one, none on a busy machine."""
    steps = 360
    limit = ("--time", "2", "--save-before", "20")
    identity = submit(own, f"run.steps={steps}", "model.arguments={pause=0.3}", *limit)
    wait_for_requeue(cluster, own, identity, within_s=130)
    assert ended(cluster, own, identity, within_s=150) == "COMPLETED", log(own, identity)
    assert used(own) == Order(30, seed=0).ids(np.arange(steps * SAMPLES_A_STEP)).tolist()


@pytest.mark.stress
def test_the_doctor_looks_at_the_hosts_of_a_job(cluster: SlurmCluster, own: Project) -> None:
    """Through srun, and as a step with a process on each host: three hosts answer, all links are measured."""
    hosts = ",".join(f"{name}=127.0.0.1" for name in cluster.hosts)
    for command in (
        ["salloc", "--quiet", "-N3", sys.executable, "-m", "shoal", "doctor", "--hosts", hosts, "--shell", "srun"],
        ["srun", "-N3", "--ntasks-per-node=1", sys.executable, "-m", "shoal", "doctor", "--hosts", "ranks"],
    ):
        environ = {**os.environ, **own.environ(), **cluster.environ, "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            [*command, "--json"], cwd=own.folder, env=environ, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        found = json.loads(done.stdout)
        assert len(found["hosts"]) == 3
        assert [link["obstacle"] for link in found["links"]] == [None] * 6


@pytest.mark.stress
def test_a_sweep_runs_its_trials_as_steps_of_a_job(cluster: SlurmCluster, own: Project) -> None:
    """Inside an allocation of three hosts, each trial is started by srun on one of them; one that a rung stops gets
    SIGTERM through srun, and saves."""
    run = (own.folder / "run.toml").read_text().replace("steps = 9", "steps = 24\nprocesses = 1")
    run = run.replace('build = "own:model"', 'build = "own:model"\narguments = {pause = 0.3}')
    (own.folder / "run.toml").write_text(run)
    (own.folder / "sweep.toml").write_text(
        'name = "s"\nrun = "run.toml"\nobjective = "loss/train"\nparallel = 3\n[search]\nkind = "asha"\n'
        'first_steps = 4\n[parameters]\n"optimizer.lr" = [0.02, 3.0, 10.0]\n'
    )
    via = "srun --quiet --nodes=1 --ntasks=1 --exact"
    done = subprocess.run(
        ["salloc", "--quiet", "-N3", sys.executable, "-m", "shoal", "sweep", "sweep.toml", "--via", via, "--json"],
        cwd=own.folder, env={**os.environ, **own.environ(), **cluster.environ}, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert rows[0]["parameters"] == {"optimizer.lr": 0.02}
    assert {row["state"] for row in rows} == {"finished", "stopped early"}
    assert all((own.folder / f"sweeps/s/trial-000{index}/checkpoints/latest").exists() for index in range(3))


@pytest.mark.stress
def test_a_sweep_is_an_array(cluster: SlurmCluster, own: Project) -> None:
    """`shoal submit` of a sweep file: each task of the array trains the trial of its number, `status` counts them, and
    the sweep, called afterwards, trains none and has the table."""
    run = (own.folder / "run.toml").read_text().replace("steps = 9", "steps = 9\nprocesses = 1")
    (own.folder / "run.toml").write_text(run)
    (own.folder / "sweep.toml").write_text(
        'name = "s"\nrun = "run.toml"\nobjective = "loss/train"\n[parameters]\n"optimizer.lr" = [1e-6, 0.05]\n'
    )
    done = own.shoal("submit", "sweep.toml", "--to", "slurm", *HERE, "--json")
    assert done.returncode == 0, done.stderr

    def standing() -> dict[str, str]:
        return json.loads(own.shoal("submit", "status", "sweeps/s", "--json").stdout)

    wait_until(lambda: standing()["state"] in ("done", "failed"), "the trials", lambda: str(standing()) + cluster.log())
    assert standing()["sentence"].endswith("of 2 trials: 2 done")
    shown = own.shoal("submit", "logs", "sweeps/s").stdout
    assert "trial-0000: 9 steps" in shown
    assert "trial-0001: 9 steps" in shown
    found = own.shoal("sweep", "sweep.toml", "--json")
    assert [row["parameters"]["optimizer.lr"] for row in json.loads(found.stdout)["rows"]] == [0.05, 1e-6]
    assert "starts" not in found.stderr
