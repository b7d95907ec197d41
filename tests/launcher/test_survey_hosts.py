"""`shoal doctor --hosts` on real processes: hosts as network namespaces, sshd, faults planted by a remote shell."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launcher.lab.network import address, ip, network
from shoal.launcher.survey.probe import listening, measure
from tests.launcher.labs import can_lab, lab_of
from tests.services.sshd import sshd, why_not
from tests.waiting import HANG_S, wait_until

__all__ = ["can_lab"]
SOURCE = Path(__file__).parents[2] / "src"


def doctor(*options: str, environ: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Its exit code and its object."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "doctor", "--json", *options],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **(environ or {})},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def ill(found: dict[str, Any]) -> dict[str, str]:
    """What is not ok, but for processes of other runs on this machine and what it lacks itself."""
    own = {finding["name"].partition(": ")[2] for finding in local()} | {"leftovers", "disk"}
    return {
        finding["name"]: finding["repair"]
        for finding in found["findings"]
        if finding["status"] != "ok" and finding["name"].rpartition(": ")[2] not in own
    }


def local() -> list[dict[str, Any]]:
    """What a host that is this machine finds of itself alone, under the name of a host."""
    found = doctor()[1]["findings"]
    return [finding | {"name": f"x: {finding['name']}"} for finding in found if finding["status"] != "ok"]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that finds this source, as one on another host would."""
    return script(tmp_path / "python", f'export PYTHONPATH="{SOURCE}"; exec "{sys.executable}" "$@"')


def script(path: Path, text: str) -> str:
    """An executable of these lines."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.stress
def test_a_slow_host_and_one_without_a_route_are_named(can_lab: None, tmp_path: Path, python: str) -> None:
    """Three hosts in namespaces of their own, the third behind 50 instead of 1,000 Mbit/s: the slow links are its, the
    figures are near the rates of the links. Then the second loses its route to the third: both are closed to each
    other, and the others are not."""
    lab = lab_of([{"host": 2, "rate_mbit": 50}], hosts=3)
    with network(lab) as net:
        hosts = ",".join(f"{name}={address(index)}" for index, name in enumerate(net.namespaces))
        options = ("--hosts", hosts, "--shell", "ip netns exec {host}", "--python", python, "--folder", str(tmp_path))
        code, found = doctor(*options)
        assert code == 0, found["findings"]
        assert "bandwidth" in ill(found)
        assert not set(ill(found)) - {"bandwidth", "latency"}  # a busy machine answers late
        assert f"look at {net.namespaces[2]}:" in ill(found)["bandwidth"]
        rates = {(link["from"][-1], link["to"][-1]): link["bytes_per_s"] * 8e-6 for link in found["links"]}
        assert len(rates) == 6
        assert all(20 < rate < 60 for pair, rate in rates.items() if "2" in pair), rates
        assert all(rate > 200 for pair, rate in rates.items() if "2" not in pair), rates
        assert {told["route"]["interface"] for told in found["hosts"].values()} == {"eth0"}

        ip([f"route add prohibit {address(2)}/32"], namespace=net.namespaces[1])
        code, found = doctor(*options)
        assert code == 3
        closed = {(link["from"][-1], link["to"][-1]) for link in found["links"] if link["obstacle"]}
        assert closed == {("1", "2"), ("2", "1")}
        assert {f"{net.namespaces[1]}: ports", f"{net.namespaces[2]}: ports"} <= set(ill(found))


@pytest.mark.slow
def test_what_is_planted_on_one_host_is_found_there(tmp_path: Path, python: str) -> None:
    """Three hosts that are this one, by a shell of our own. On `c` torch is older, the code of Shoal another, the clock
    five seconds ahead, fewer files may be open, a variable differs; `gone` does not answer at all."""
    shutil.copytree(SOURCE / "shoal", tmp_path / "other/shoal", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other/shoal/units.py").open("a").write("\n# another version\n")
    (tmp_path / "other/torch-2.11.5.dist-info").mkdir()
    (tmp_path / "other/torch-2.11.5.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.5\n"
    )
    (tmp_path / "other/sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 5.0\n"
    )
    shell = script(
        tmp_path / "shell",
        'host=$1; shift\n[ "$host" = gone ] && { echo "connection refused by gone" >&2; exit 255; }\n'
        'echo "Welcome to $host"\n'
        f'[ "$host" = c ] && {{ ulimit -n 512; export NCCL_DEBUG=INFO PYTHONPATH="{tmp_path}/other"; '
        f'shift; exec "{sys.executable}" "$@"; }}\n'
        'exec "$@"',
    )
    hosts = ",".join(f"{name}=127.0.0.1" for name in ("a", "b", "c", "gone"))
    code, found = doctor("--hosts", hosts, "--shell", shell, "--python", python)
    assert code == 3
    repairs = {name: repair for name, repair in ill(found).items() if name not in ("bandwidth", "latency")}
    assert set(repairs) == {"gone: probe", "c: clock", "version of torch", "code of Shoal", "variable NCCL_DEBUG",
                            "limit of open files", "c: open files"}  # fmt: skip
    assert "pip install 'torch==" in repairs["version of torch"]
    assert "on c" in repairs["version of torch"]
    assert repairs["code of Shoal"] == "install on c what a has"
    assert repairs["c: open files"].startswith("ulimit -n")
    assert "raise it on c: ulimit -n" in repairs["limit of open files"]
    said = {finding["name"]: finding["found"] for finding in found["findings"]}
    assert said["gone: probe"] == "connection refused by gone"
    ahead_s, _, unit = said["c: clock"].partition(" ")
    assert unit == "s ahead"
    assert float(ahead_s) == pytest.approx(5.0, abs=1.0)  # half a round trip to a busy machine


def test_a_port_that_is_taken_and_a_run_that_is_there_are_found(tmp_path: Path, python: str) -> None:
    """Somebody listens at the master's port; a process of a run is on the host."""
    fake = script(tmp_path / "shoal", "echo up; read -r end")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        subprocess.Popen([fake, "train", "x.toml"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run,
    ):
        assert run.stdout is not None
        run.stdout.readline()
        port = taken.getsockname()[1]
        code, found = doctor(
            "--hosts", "a=127.0.0.1", "--shell", "env X={host}", "--python", python, "--port", str(port)
        )
        run.communicate(b"end\n")
    assert code == 3
    repairs = {finding["name"]: finding["repair"] for finding in found["findings"]}
    assert f"sport = :{port}" in repairs[f"a: port {port}"]
    assert repairs["a: leftovers"].startswith("wait for them")
    assert run.pid in {one["pid"] for one in found["hosts"]["a"]["leftovers"]}  # the repair names some of them


@pytest.mark.slow
def test_no_probe_is_left_when_the_doctor_is_interrupted(tmp_path: Path, python: str) -> None:
    """Ctrl-C while a host's shell hangs: exit 130, and neither probe nor shell stays."""
    shell = script(
        tmp_path / "shell", f'echo $$ >> "{tmp_path}/pids"; [ "$1" = b ] && exec sleep infinity; shift; exec "$@"'
    )
    command = [sys.executable, "-m", "shoal", "doctor", "--hosts", "a=127.0.0.1,b=127.0.0.1", "--shell", shell,
               "--python", python]  # fmt: skip
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stderr=subprocess.PIPE) as asking:
        pids = tmp_path / "pids"
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        asking.send_signal(signal.SIGINT)
        assert asking.wait(HANG_S) == 130
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


def test_who_does_not_know_the_token_is_sent_away() -> None:
    """The port answers probes of this doctor alone."""
    with listening(0, "right") as (port, fault):
        assert fault is None
        assert measure("127.0.0.1", port, "wrong").obstacle is not None
        link = measure("127.0.0.1", port, "right")
    assert link.obstacle is None
    assert link.bytes_per_s > 0
    assert abs(link.ahead_s) <= link.round_trip_s  # one clock, and half of the shortest round trip is the error


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that reaches a real sshd on a port of loopback."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with sshd(tmp_path) as command:
        yield command


@pytest.mark.stress
def test_over_ssh(ssh: str, tmp_path: Path, python: str) -> None:
    """A real sshd: two names of this host answer, and one that ssh refuses is named with ssh's own words."""
    code, found = doctor(
        "--hosts", "127.0.0.1,localhost", "--shell", ssh, "--python", python, "--folder", str(tmp_path)
    )
    assert code == 0, found["findings"]
    assert list(found["hosts"]) == ["127.0.0.1", "localhost"]
    assert all(link["obstacle"] is None for link in found["links"])
    code, found = doctor("--hosts", "nobody@127.0.0.1", "--shell", ssh, "--python", python)
    assert code == 3
    (probe,) = (f for f in found["findings"] if f["status"] != "ok")
    assert probe["name"] == "nobody@127.0.0.1: probe"
    assert "ermission denied" in probe["found"]


@pytest.mark.stress
def test_the_ranks_themselves_look_at_their_hosts(can_lab: None, python: str) -> None:
    """Three processes with a launcher's variables, each in a namespace of its own: rank 0 prints, the others are
    silent. One that does not come is named."""
    with network(lab_of(hosts=3)) as net, contextlib.ExitStack() as running:
        ranks = []
        for rank in range(3):
            environ = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": address(0), "MASTER_PORT": "29400", "PATH": os.environ["PATH"]}  # fmt: skip
            command = [*net.enter(rank), python, "-m", "shoal", "doctor", "--hosts", "ranks", "--json"]
            ranks.append(
                running.enter_context(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
            )
        said = [process.communicate(timeout=HANG_S)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0, 0], said
    assert said[1:] == ["", ""]
    found = json.loads(said[0])
    assert len(found["hosts"]) == 3
    assert len([link for link in found["links"] if link["obstacle"] is None]) == 6
    assert not ill(found)
