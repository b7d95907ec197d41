"""Elastic runs on several hosts: a coordinator apart, a launcher on each host, and hosts that are lost or cut off."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.checkpoint.commit import checkpoints, newest_verified
from shoal.checkpoint.inspect import compare
from shoal.launcher.lab.network import address, inside, ip, network
from tests.cli.elastic_runs import (
    gpt_project,
    memberships,
    rank_zero,
    replicas_of,
    set_pace,
    undisturbed,
    wait_for_join,
)
from tests.cli.project import Project
from tests.launcher.labs import can_lab, lab_of
from tests.ports import free_port
from tests.programs import ended
from tests.waiting import HANG_S, wait_until

LOSS_TOLERANCE = 1e-9
STOPPED = 75
PORT = 29461
"""Of the coordinator, in a namespace of its own."""
__all__ = ["can_lab"]
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the command openssl")


@dataclass(frozen=True)
class Host:
    """A host of a run: what stands before its commands, and the name by which it tells itself from others."""

    name: str
    prefix: tuple[str, ...] = ()

    def start(self, own: Project, *command: str, output: str) -> subprocess.Popen[str]:
        """`shoal ...` there, in a session of its own."""
        with open(own.folder / output, "w") as out:
            return subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "shoal", *command],
                cwd=own.folder,
                env=own.environ(SHOAL_HOST=self.name),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )


@contextmanager
def namespaces(count: int) -> Iterator[list[Host]]:
    """Hosts with an address each, on one switch: see `shoal.launcher.lab.network`."""
    with network(lab_of(hosts=count)) as net:
        yield [Host(name, tuple(inside(name))) for name in net.namespaces]


def lose_packets_between(a: int, b: int, hosts: list[Host]) -> None:
    """From now on the two send to each other by an address of Ethernet that no card has: nobody is told of a loss."""
    for here, there in ((a, b), (b, a)):
        nobody = f"neigh replace {address(there)} dev eth0 lladdr 02:00:00:00:00:01 nud permanent"
        ip([nobody], namespace=hosts[here].name)


def coordinate(own: Project, host: Host, processes: list[subprocess.Popen[str]], *options: str) -> str:
    """Starts a coordinator for one or two replicas; where it listens."""
    command = ("serve", "job.journal", "--token", "job.token", "--min", "1", "--max", "2", "--start", "30", *options)
    processes.append(host.start(own, "coordinator", *command, "--json", output="coordinator.txt"))
    own.wait_for_text(r"\}\n", output="coordinator.txt")
    where = json.loads(own.said("coordinator.txt").splitlines()[0])
    return f"{where['address']}:{where['port']}"


def coordinate_by_tls(own: Project, number: int, host: Host, processes: list[subprocess.Popen[str]]) -> tuple[str, ...]:
    """A coordinator at the address of host `number` of a lab; the options of a launcher that is to believe it alone."""
    make_certificate(own, address(number))
    identity = ("--certificate", "certificate.pem", "--key", "key.pem")
    where = coordinate(own, host, processes, "--address", address(number), "--port", str(PORT), *identity)
    return ("--coordinator", where, "--token", "job.token", "--authorities", "certificate.pem")


def make_certificate(own: Project, address: str) -> None:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN={address} -addext subjectAltName=IP:{address} -keyout key.pem -out certificate.pem"
    )
    subprocess.run(command.split(), cwd=own.folder, check=True, capture_output=True)


@pytest.mark.stress
def test_a_lost_host_is_a_lost_replica(tmp_path: Path) -> None:
    """kill -9 of one of two launchers: its replica is gone with it, the other host goes on, and a launcher that is
    started again joins. The losses are those of one process that nothing happens to."""
    own, processes = gpt_project(tmp_path), []
    plain = undisturbed(own)
    here = Host("one")
    with ended(processes):
        options = ("--coordinator", coordinate(own, here, processes), "--token", "job.token")
        set_pace(own, 0.3)
        first, second = (here.start(own, "train", "run.toml", *options, output=f"{n}.txt") for n in (1, 2))
        processes += [first, second]
        own.wait_for_step(3)
        leader = 1 if "step" in own.said("1.txt") else 2
        lost, rest = (second, first) if leader == 1 else (first, second)
        lost.kill()
        own.wait_for_text(r"1 of 2 replicas; rank \d lost after step", output=f"{leader}.txt")
        again = here.start(own, "train", "run.toml", *options, output="3.txt")
        processes.append(again)
        wait_for_join(own, r"2 of 2 replicas; rank 1 joined after step", output=f"{leader}.txt")
        set_pace(own, 0.0)
        assert rest.wait(HANG_S) == 0, own.said(f"{leader}.txt")
        assert again.wait(HANG_S) == 0, own.said("3.txt")
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)


@pytest.mark.stress
def test_without_the_coordinator_a_run_goes_on_until_a_loss_and_then_saves(tmp_path: Path) -> None:
    """kill -9 of the coordinator, for good: both hosts go on. When one is lost, the other saves the state that it
    holds, after the newest step of all, and ends with 3 and a sentence; from there the run goes on as if nothing had
    happened."""
    own, processes = gpt_project(tmp_path), []
    plain = undisturbed(own)
    here = Host("one")
    with ended(processes):
        where = coordinate(own, here, processes)
        keys = ("checkpoint.every_steps=0", "elastic.accept_s=15", "elastic.wait_s=20")
        options = ("--coordinator", where, "--token", "job.token", *keys)
        set_pace(own, 0.3)
        first, second = (here.start(own, "train", "run.toml", *options, output=f"{n}.txt") for n in (1, 2))
        processes += [first, second]
        own.wait_for_step(3)
        processes[0].kill()
        processes[0].wait()
        own.wait_for_step(max(own.losses()) + 10)
        leader = 1 if "step" in own.said("1.txt") else 2
        lost, rest = (second, first) if leader == 1 else (first, second)
        lost.kill()
        assert rest.wait(HANG_S) == 3, own.said(f"{leader}.txt")
    said = " ".join(own.said(f"{leader}.txt").split())
    found = re.search(r"the state after step (\d+) is saved, and the same command resumes from it", said)
    assert found, said
    assert "does not answer: start it" in said
    assert newest_step(own) == int(found[1]) == max(own.losses())
    set_pace(own, 0.0)
    done = own.shoal("train", "fixed.toml", "run.processes=1")
    assert done.returncode == 0, done.stderr
    assert f"resuming from the checkpoint of step {found[1]}" in done.stdout
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)


@pytest.mark.stress
def test_nobody_loses_a_step_when_the_coordinator_is_killed_and_started_again(tmp_path: Path) -> None:
    """kill -9, some steps, a new one on the same journal and port, and then a loss: the same generation has gone on,
    the next one forms, a replacement joins, and the losses are those of an undisturbed run."""
    own, processes = gpt_project(tmp_path), []
    plain = undisturbed(own)
    here = Host("one")
    with ended(processes):
        where = coordinate(own, here, processes)
        options = ("--coordinator", where, "--token", "job.token", "--replicas", "2")
        set_pace(own, 0.3)
        launcher = here.start(own, "train", "run.toml", *options, output="1.txt")
        processes.append(launcher)
        own.wait_for_step(3)
        processes[0].kill()
        processes[0].wait()
        own.wait_for_step(max(own.losses()) + 5)
        assert coordinate(own, here, processes, "--port", where.rpartition(":")[2]) == where
        own.wait_for_step(max(own.losses()) + 5)
        assert memberships(own) == [2], "a restart of the coordinator ends no generation"
        pids = [pid for ranks in replicas_of(launcher).values() for pid in ranks]
        os.kill(next(pid for pid in pids if pid != rank_zero(pids)), signal.SIGKILL)
        wait_for_join(own, r"2 of 2 replicas; rank 1 joined after step", output="1.txt")
        set_pace(own, 0.0)
        assert launcher.wait(HANG_S) == 0, own.said("1.txt")
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)


@pytest.mark.stress
def test_two_replicas_become_four_and_then_three_without_a_restart(tmp_path: Path) -> None:
    """`shoal coordinator scale`: those that stand by join between two steps, and one stands by again; no process is
    started or ended, and the losses are those of an undisturbed run."""
    own, processes = gpt_project(tmp_path), []
    plain = undisturbed(own)
    here = Host("one")
    with ended(processes):
        where = coordinate(own, here, processes, "--max", "4")
        scale = ("coordinator", "scale", where)
        options = ("--coordinator", where, "--token", "job.token", "--replicas", "4", "elastic.max=4")
        set_pace(own, 0.3)
        assert own.shoal(*scale, "2", "--token", "job.token").returncode == 0
        launcher = here.start(own, "train", "run.toml", *options, output="1.txt")
        processes.append(launcher)
        own.wait_for_step(3)
        first = replicas_of(launcher)
        for replicas in (4, 3):
            assert own.shoal(*scale, str(replicas), "--token", "job.token").returncode == 0
            own.wait_for_text(rf"(?s)joined after step.*{replicas} of 4 replicas" if replicas == 3 else
                              "4 of 4 replicas; .*joined after step", output="1.txt")  # fmt: skip
        assert replicas_of(launcher) == first
        set_pace(own, 0.0)
        assert launcher.wait(HANG_S) == 0, own.said("1.txt")
    assert memberships(own) == [2, 4, 3]
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)


@pytest.mark.stress
def test_the_replicas_of_a_host_that_is_taken_away_leave_and_those_elsewhere_go_on(tmp_path: Path) -> None:
    """Its notice appears: its replica hands over after the step and its launcher ends with 75; the other host takes the
    rest of the steps."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    a, b = (gpt_project(folder) for folder in folders)
    plain, processes = undisturbed(a), []
    here = Host("one")
    with ended(processes):
        where = coordinate(a, here, processes)
        keys = ('elastic.preemption_file="notice"', "checkpoint.every_steps=0")
        options = ("--coordinator", where, "--token", str(a.folder / "job.token"), *keys)
        for own in (a, b):
            set_pace(own, 0.3)
        stays, goes = (here.start(own, "train", "run.toml", *options, output="1.txt") for own in (a, b))
        processes += [stays, goes]
        wait_until(lambda: len({**a.losses(), **b.losses()}) > 3, lambda: a.said("1.txt") + b.said("1.txt"))
        (b.folder / "notice").write_text("reclaimed")
        assert goes.wait(HANG_S) == STOPPED, b.said("1.txt")
        assert "its replicas hand over and leave" in b.said("1.txt")
        set_pace(a, 0.0)
        assert stays.wait(HANG_S) == 0, a.said("1.txt")
    both = a.losses() | b.losses()
    assert both == pytest.approx({step: plain[step] for step in both}, rel=LOSS_TOLERANCE)
    assert len(both) >= len(plain) - 1, "the record of one step may leave with rank 0"


@pytest.mark.stress
def test_a_run_of_several_hosts_that_fails_leaves_its_ending_and_a_capsule(tmp_path: Path) -> None:
    """The user's code fails, as it would on all hosts: what a run on one host leaves is there, too."""
    own, processes = gpt_project(tmp_path), []
    with (own.folder / "own.py").open("a") as code:
        code.write("    if Path('boom').exists():\n        raise ValueError('a mistake of the user')\n")
    here = Host("one")
    with ended(processes):
        options = ("--coordinator", coordinate(own, here, processes), "--token", "job.token")
        set_pace(own, 0.2)
        processes.append(here.start(own, "train", "run.toml", *options, "--replicas", "2", output="1.txt"))
        own.wait_for_step(3)
        (own.folder / "boom").touch()
        assert processes[-1].wait(HANG_S) == 2, own.said("1.txt")
    facts = json.loads((own.folder / "runs/own/facts.json").read_text())
    assert facts["state"] == "failed"
    assert facts["failure"]["exit_code"] == 2
    assert re.search(r"capsule: (\S+);", own.said("1.txt"))


@pytest.mark.stress
def test_hosts_without_a_common_file_system_each_keep_all_checkpoints(tmp_path: Path) -> None:
    """Two launchers with a run directory each: both save all; one is killed, the other goes on and saves. Stopped and
    started again, the host that was lost gets the newest checkpoint from the other one, and the run ends like one that
    nothing happened to."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    a, b = (gpt_project(folder) for folder in folders)
    plain, processes = undisturbed(a), []
    here = Host("one")
    with ended(processes):
        token = str(a.folder / "job.token")
        options = ("--coordinator", coordinate(a, here, processes), "--token", token, "checkpoint.every_steps=5")
        for own in (a, b):
            set_pace(own, 0.2)
        first, second = (here.start(own, "train", "run.toml", *options, output="1.txt") for own in (a, b))
        processes += [first, second]
        for own in (a, b):
            wait_until(lambda own=own: len(checkpoints(own.folder / "runs/own")) > 0, lambda own=own: own.said("1.txt"))
        second.kill()
        leads = lambda: "1 of 2 replicas" in a.said("1.txt")  # noqa: E731
        wait_until(leads, lambda: a.said("1.txt"))
        at_loss = newest_step(b)
        wait_until(lambda: newest_step(a) > at_loss + 5, lambda: a.said("1.txt"))
        first.send_signal(signal.SIGTERM)
        assert first.wait(HANG_S) == STOPPED, a.said("1.txt")
        stopped_at = newest_step(a)
        assert newest_step(b) < stopped_at
        again = [here.start(own, "train", "run.toml", *options, output="2.txt") for own in (b, a)]
        processes += again
        wait_until(lambda: newest_step(b) >= stopped_at, lambda: b.said("2.txt"))
        for own in (a, b):
            set_pace(own, 0.0)
        for process, own in zip(again, (b, a), strict=True):
            assert process.wait(HANG_S) == 0, own.said("2.txt")
    assert not compare(a.folder / "runs/own", b.folder / "runs/own").differences
    both = a.losses() | b.losses()
    assert both == pytest.approx({step: plain[step] for step in both}, rel=LOSS_TOLERANCE)
    assert len(both) >= len(plain) - 1, "the record of one step may die with rank 0"


@pytest.mark.stress
def test_a_run_that_is_not_elastic_needs_no_common_file_system_either(tmp_path: Path) -> None:
    """Two launchers with a run directory each: both hold all checkpoints. One loses its directory, and the next start
    goes on where the last one ended, on both."""
    (tmp_path / "token").write_bytes(os.urandom(32))
    (tmp_path / "token").chmod(0o600)
    runs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        runs.append(gpt_project(tmp_path / name))
    launched(tmp_path, runs, "run.steps=40")
    assert [newest_step(own) for own in runs] == [40, 40]
    assert not compare(*(own.folder / "runs/own" for own in runs)).differences
    shutil.rmtree(runs[0].folder / "runs/own/checkpoints")
    launched(tmp_path, runs, "run.steps=60")
    assert [newest_step(own) for own in runs] == [60, 60]
    assert sorted(runs[0].losses()) == list(range(1, 61))
    assert "resuming from the checkpoint of step 40" in runs[0].said()
    assert not compare(*(own.folder / "runs/own" for own in runs)).differences


def launched(folder: Path, runs: list[Project], *overrides: str) -> None:
    """One rank of each of `runs`, by a launcher each, to a good end."""
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    with ended(processes):
        for number, own in enumerate(runs):
            environ = own.environ(
                SHOAL_HOST=f"host-{number}", SHOAL_JOB_TOKEN=str(folder / "token"), PET_NNODES="2",
                PET_NODE_RANK=str(number), PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=str(port),
            )  # fmt: skip
            train = ("-m", "shoal", "train", "fixed.toml", "checkpoint.every_steps=20", *overrides)
            with open(own.folder / "out.txt", "w") as out:
                command = [sys.executable, "-m", "shoal", "launch", "-n", "1", *train]
                processes.append(
                    subprocess.Popen(command, cwd=own.folder, env=environ, stdout=out, stderr=out, text=True)
                )
        for process, own in zip(processes, runs, strict=True):
            assert process.wait(HANG_S) == 0, own.said()


def newest_step(own: Project) -> int:
    """Of the checkpoints of the run; 0 without one."""
    manifest, _ = newest_verified(own.folder / "runs/own")
    return 0 if manifest is None else manifest.step


@pytest.mark.stress
@needs_openssl
@pytest.mark.usefixtures("can_lab")
def test_the_side_with_the_coordinator_goes_on_through_a_silent_partition(tmp_path: Path) -> None:
    """The link between two hosts is cut without a word: the host with the coordinator goes on alone, the other one
    stands and says why, and joins when the link is back."""
    own, processes = gpt_project(tmp_path), []
    with namespaces(2) as (a, b), ended(processes):
        options = coordinate_by_tls(own, 0, a, processes)
        set_pace(own, 0.3)
        near, far = (h.start(own, "train", "run.toml", *options, output=f"{h.name}.txt") for h in (a, b))
        processes += [near, far]
        own.wait_for_step(3)
        ip(["link set eth0 down"], namespace=b.name)
        own.wait_for_text(r"1 of 2 replicas; rank \d lost after step", output=f"{a.name}.txt")
        own.wait_for_text("has not answered for", output=f"{b.name}.txt")
        ip(["link set eth0 up"], namespace=b.name)
        own.wait_for_text("answers again", output=f"{b.name}.txt")
        wait_for_join(own, r"2 of 2 replicas; rank 1 joined after step", output=f"{a.name}.txt")
        set_pace(own, 0.0)
        assert near.wait(HANG_S) == 0, own.said(f"{a.name}.txt")
        assert far.wait(HANG_S) == 0, own.said(f"{b.name}.txt")


@pytest.mark.stress
@needs_openssl
@pytest.mark.usefixtures("can_lab")
def test_of_hosts_that_reach_the_coordinator_alone_one_goes_on(tmp_path: Path) -> None:
    """Nothing passes between two hosts, while both reach the coordinator: their collectives fail again and again, until
    one of them, which the other suspects, is fenced; the other one takes the steps."""
    own, processes = gpt_project(tmp_path), []
    with namespaces(3) as hosts, ended(processes):
        options = (*coordinate_by_tls(own, 2, hosts[2], processes), "wire.timeout_s=5", "elastic.retries=0")
        set_pace(own, 0.3)
        launchers = [hosts[n].start(own, "train", "run.toml", *options, output=f"{n}.txt") for n in range(2)]
        processes += launchers
        own.wait_for_step(3)
        lose_packets_between(0, 1, hosts)
        fenced = lambda: [n for n in range(2) if "its peers cannot reach it" in own.said(f"{n}.txt")]  # noqa: E731
        wait_until(fenced, lambda: own.said("0.txt") + own.said("1.txt"))
        (gone,) = fenced()
        set_pace(own, 0.0)
        assert launchers[1 - gone].wait(HANG_S) == 0, own.said(f"{1 - gone}.txt")
        assert launchers[gone].wait(HANG_S) in (0, 3), own.said(f"{gone}.txt")
    assert max(own.losses()) == 200


@pytest.mark.slow
def test_a_launcher_without_the_jobs_token_starts_nothing(tmp_path: Path) -> None:
    """A coordinator that is not there, or has another token: exit 3 and a sentence, before any rank is started."""
    own, processes = gpt_project(tmp_path), []
    with ended(processes):
        where = coordinate(own, Host("one"), processes)
        (own.folder / "other.token").write_bytes((own.folder / "job.token").read_bytes()[::-1])
        (own.folder / "other.token").chmod(0o600)
        for address, token, said in (
            (where, "other.token", "refuses this process's token"),
            ("127.0.0.1:9", "job.token", "nothing answers at 127.0.0.1:9"),
        ):
            done = own.shoal("train", "run.toml", "--coordinator", address, "--token", token)
            assert done.returncode == 3
            assert said in " ".join(done.stderr.split())
            assert not (own.folder / "runs/own/hosts").exists()


def test_options_of_a_run_on_several_hosts_are_refused_alone(tmp_path: Path) -> None:
    """A coordinator without a token, a token without a coordinator, and a run file without [elastic]: a sentence."""
    own = gpt_project(tmp_path)
    for file, options, said in (
        ("run.toml", ("--coordinator", "127.0.0.1:1"), "asks for the job's token"),
        ("run.toml", ("--coordinator", "nowhere", "--token", "t"), "'nowhere' is no address"),
        ("run.toml", ("--token", "t"), "goes with --coordinator"),
        ("fixed.toml", ("--coordinator", "127.0.0.1:1", "--token", "t"), "no table [elastic]"),
    ):
        done = own.here("train", file, *options)
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())
