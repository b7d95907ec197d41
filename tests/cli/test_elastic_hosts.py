"""Elastic runs on several hosts: a coordinator apart, a launcher on each host, and hosts that are lost or cut off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.checkpoint.inspect import compare
from shoal.checkpoint.verify import checkpoints, newest_verified
from tests.cli.elastic_runs import gpt_project, set_pace, undisturbed, wait_for_join
from tests.cli.project import Project
from tests.programs import ended
from tests.waiting import HANG_S, wait_until

LOSS_TOLERANCE = 1e-9
STOPPED = 75
PORT = 29461
"""Of the coordinator, in a namespace of its own."""


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
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two network namespaces with a link between them: 10.78.0.1 and 10.78.0.2."""
    prefix = f"shoal-elastic-{os.getpid()}-"
    names = [prefix + "a", prefix + "b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        hosts = [Host(name, ("ip", "netns", "exec", name)) for name in names]
        yield hosts[0], hosts[1]


def may_make_namespaces() -> bool:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("openssl"):
        return False
    name = f"shoal-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made


def coordinate(own: Project, host: Host, processes: list[subprocess.Popen[str]], *options: str) -> str:
    """Starts a coordinator for one or two replicas; where it listens."""
    command = ("serve", "job.journal", "--token", "job.token", "--min", "1", "--max", "2", "--start", "30", *options)
    processes.append(host.start(own, "coordinator", *command, "--json", output="coordinator.txt"))
    own.wait_for_text(r"\}\n", output="coordinator.txt")
    where = json.loads(own.said("coordinator.txt").splitlines()[0])
    return f"{where['address']}:{where['port']}"


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
    assert "going on from the checkpoint of step 40" in runs[0].said()
    assert not compare(*(own.folder / "runs/own" for own in runs)).differences


def launched(folder: Path, runs: list[Project], *overrides: str) -> None:
    """One rank of each of `runs`, by a launcher each, to a good end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
@pytest.mark.skipif(not may_make_namespaces(), reason="needs network namespaces and the command openssl")
def test_the_side_with_the_coordinator_goes_on_through_a_silent_partition(tmp_path: Path) -> None:
    """The link between two hosts is cut without a word: the host with the coordinator goes on alone, the other one
    stands and says why, and joins when the link is back."""
    own, processes = gpt_project(tmp_path), []
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=10.78.0.1 "
        "-addext subjectAltName=IP:10.78.0.1 -keyout key.pem -out certificate.pem"
    )
    subprocess.run(make.split(), cwd=own.folder, check=True, capture_output=True)
    with two_hosts() as (a, b), ended(processes):
        tls = ("--address", "10.78.0.1", "--certificate", "certificate.pem", "--key", "key.pem", "--port", str(PORT))
        where = coordinate(own, a, processes, *tls)
        options = ("--coordinator", where, "--token", "job.token", "--authorities", "certificate.pem")
        set_pace(own, 0.3)
        near, far = (h.start(own, "train", "run.toml", *options, output=f"{h.name}.txt") for h in (a, b))
        processes += [near, far]
        own.wait_for_step(3)
        cut = ["ip", "-n", b.name, "link", "set", "eth0"]
        subprocess.run([*cut, "down"], check=True)
        own.wait_for_text(r"1 of 2 replicas; rank \d lost after step", output=f"{a.name}.txt")
        own.wait_for_text("has not answered for", output=f"{b.name}.txt")
        subprocess.run([*cut, "up"], check=True)
        own.wait_for_text("answers again", output=f"{b.name}.txt")
        wait_for_join(own, r"2 of 2 replicas; rank 1 joined after step", output=f"{a.name}.txt")
        set_pace(own, 0.0)
        assert near.wait(HANG_S) == 0, own.said(f"{a.name}.txt")
        assert far.wait(HANG_S) == 0, own.said(f"{b.name}.txt")


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
