"""A job on a real Ray cluster of two hosts: gang start, a killed actor, a cluster too small, a cancelled job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.data.order import Order
from tests.cli.project import Project, project
from tests.services.ray import ray_cluster, why_not
from tests.services.slurm import wait_until
from tests.waiting import HANG_S

pytestmark = [pytest.mark.stress, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
STEPS = 30


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster() as running:
        yield running


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


def submit(own: Project, address: str, *options: str, hosts: int = 2) -> str:
    """Submit to as many hosts of one rank each; the driver's number."""
    here = ("--env", "OMP_NUM_THREADS=1", "--env", "GLOO_SOCKET_IFNAME=lo")
    done = own.shoal("submit", "run.toml", "--to", "ray", "--address", address, "--nodes", str(hosts),
                     "--ranks-per-node", "1", "--json", *here, *options)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["id"]


def status(own: Project) -> dict[str, str]:
    done = own.shoal("submit", "status", "runs/own", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def log(own: Project) -> str:
    return (own.folder / "runs/own/submit/ray.log").read_text(errors="replace")


def until(own: Project, state: str, *, within_s: float = HANG_S) -> str:
    """Wait for the state; the driver's last sentence."""
    wait_until(lambda: status(own)["state"] == state, state, lambda: log(own), within_s=within_s)
    return status(own)["sentence"]


def processes(word: str) -> dict[int, int]:
    """Parent by process, of those whose command has the word."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def test_a_killed_actor_is_named_and_every_sample_is_used_in_order(address: str, own: Project) -> None:
    """`kill -9` of one of two actors in mid-run: its launcher and rank end with it, the driver names the lost host,
    all start again from the newest checkpoint, and the steps that count use the samples of an undisturbed run."""
    submit(own, address, f"run.steps={STEPS}", "model.arguments={pause=0.2}")
    own.wait_for_step(4)
    launchers = {
        pid: parent for pid, parent in processes("-m\0shoal\0launch").items() if pid in processes(str(own.folder))
    }
    actors = processes("ray::RayHost")
    victim = next(parent for parent in launchers.values() if parent in actors)
    mine = [pid for pid, parent in processes(str(own.folder)).items() if parent == victim]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine), "the launcher's end", lambda: log(own))
    sentence = until(own, "done")
    assert sentence == "own: is done, started again 1 time"
    assert "of 2 was lost (" in log(own)
    assert "starts again from its newest checkpoint" in log(own)
    assert "resumed after step" in log(own)
    last: dict[tuple[int, int], list[int]] = {}
    for line in map(json.loads, (own.folder / "used.jsonl").read_text().splitlines()):
        last[line["step"], line["rank"]] = line["ids"]
    used = [sample for _, ids in sorted(last.items()) for sample in ids]
    assert used == Order(30, seed=0).ids(np.arange(STEPS * 5)).tolist()


def test_a_launcher_that_crashes_at_the_start_holds_no_other_host_up(address: str, own: Project) -> None:
    """`kill -9` of one of two launchers before its rank has met the other's, which would wait for it for ten minutes:
    the driver says which host failed and which was told to end, and the next start trains."""
    submit(own, address)

    def launcher() -> int | None:
        for pid in processes("-m\0shoal\0launch").keys() & processes(str(own.folder)).keys():
            with contextlib.suppress(OSError):
                if b"PET_NODE_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                    return pid
        return None

    wait_until(lambda: launcher() is not None, "the launcher", lambda: log(own))
    victim = launcher()
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert until(own, "done") == "own: is done, started again 1 time"
    said = "host 1 of 2 ended with exit code 137; host 0 went on, and was told to end; starts again from its newest"
    assert said in log(own)
    assert "SIGTERM: " in log(own)  # the launcher of host 0


def test_a_cluster_that_is_too_small_starts_no_rank(address: str, own: Project) -> None:
    """Three hosts asked of two: after the wait a sentence says what was asked and what is there, and nothing ran."""
    submit(own, address, "--wait", "3", hosts=3)
    sentence = until(own, "failed")
    assert "had no room within 3 s for 3 bundles of 1 CPU on different hosts" in sentence
    assert "no rank was started; it has 2 hosts (2 CPU; 2 CPU)" in sentence
    assert not (own.folder / "used.jsonl").exists()


def test_a_cancelled_job_saves(address: str, own: Project) -> None:
    """`cancel` reaches the ranks: they save, and nothing starts again."""
    submit(own, address, "run.steps=500", "model.arguments={pause=0.2}", "checkpoint.every_steps=1000")
    own.wait_for_step(2)
    assert own.shoal("submit", "cancel", "runs/own").returncode == 0
    assert until(own, "failed") == "cancelled; ranks that trained have saved"
    assert (own.folder / "runs/own/checkpoints/latest").exists()
    again = own.shoal("submit", "cancel", "runs/own")
    assert again.returncode == 2
    assert "cancelled; ranks that trained have saved: there is nothing to cancel" in again.stderr


def test_no_cluster_is_a_sentence(own: Project) -> None:
    """An address where nothing answers."""
    submit(own, "127.0.0.1:1")
    assert "no Ray cluster answers at '127.0.0.1:1'" in until(own, "failed", within_s=90)


SWEEP = """
name = "{kind}"
run = "run.toml"
objective = "loss/train"
parallel = 2
[search]
{search}
[parameters]
"optimizer.lr" = [0.02, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6]
"""


@pytest.mark.timeout(600)
def test_a_sweep_over_the_cluster_stops_early_and_finds_the_best_of_the_grid(
    address: str, own: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight trials, two at a time, each in the cluster's own queue: asynchronous halving takes at most half the steps
    of the grid, which is trained on this host, and comes to the same best."""
    run = (own.folder / "run.toml").read_text().replace("steps = 9", "steps = 60\nprocesses = 1").replace("= 5", "= 30")
    run = run.replace('build = "own:model"', 'build = "own:model"\narguments = {pause = 0.05}')
    (own.folder / "run.toml").write_text(run.replace("every_steps = 1", ""))
    monkeypatch.setenv("RAY_ADDRESS", address)
    results = {}
    asha = 'kind = "asha"\nfirst_steps = 10\nfactor = 2'
    for kind, search, via in (("grid", 'kind = "grid"', []), ("asha", asha, ["--via", "ray"])):
        (own.folder / "sweep.toml").write_text(SWEEP.format(kind=kind, search=search))
        done = own.shoal("sweep", "sweep.toml", *via, "--json", timeout_s=240)
        assert done.returncode == 0, done.stderr
        results[kind] = json.loads(done.stdout)
    assert results["asha"]["rows"][0]["parameters"] == results["grid"]["rows"][0]["parameters"]
    assert 2 * results["asha"]["steps"] <= results["grid"]["steps"]
    assert {"finished", "stopped early"} == {row["state"] for row in results["asha"]["rows"]}
