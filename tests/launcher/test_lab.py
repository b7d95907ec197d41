"""Hosts of a lab are there while it runs, shaped and apart; and nothing of them is left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from shoal.launcher import doctor
from shoal.launcher.lab import network as network_module
from shoal.launcher.lab.network import address, counted, network, throttled_entry
from tests.launcher.labs import can_lab, lab_of
from tests.waiting import HANG_S, wait_until

__all__ = ["can_lab"]
SOURCE = Path(__file__).parents[2] / "src"
OWNER = """
import time
from shoal.launcher.lab.lab_file import lab_from
from shoal.launcher.lab.network import network
from shoal.launcher.lab.network import unwinding
with unwinding(), network(lab_from({"lab": {"hosts": 2, "rate_mbit": 10}}, file="lab")):
    print("ready", flush=True)
    time.sleep(3600)
"""
RANK = """
import json, os, socket
from pathlib import Path
from shoal.comm.shm.host import host_identity
print(json.dumps({name: os.environ.get(name) for name in
      ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "SHOAL_HOST")}
      | {"interfaces": sorted(name for _, name in socket.if_nameindex()), "net": os.readlink("/proc/self/ns/net")}))
"""
LAUNCH = """
import os, sys
from pathlib import Path
from shoal.launcher.lab.lab_file import lab_from
from shoal.launcher.lab.network import run_in_lab
lab = lab_from({"lab": {"hosts": 2, "ranks_per_host": [2, 1], "rate_mbit": 10}}, file="lab")
sys.exit(run_in_lab(lab, [sys.executable, "-c", sys.argv[1]], run_directory=Path(sys.argv[2]), environ=os.environ))
"""


def of(pid: int) -> list[str]:
    """The namespaces that process `pid` has made."""
    return [name for name in network_module.namespaces() if name.startswith(f"shoal-lab-{pid}-")]


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another process, in the middle of its lab."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("can_lab")
def test_a_lab_has_its_hosts_and_rates_and_leaves_nothing() -> None:
    """Each link is shaped at both ends, a pair's own line too; an exception ends the lab like the end of its block."""
    lab = lab_of([{"between": [0, 2], "rate_mbit": 7}], hosts=3, rate_mbit=25)
    with suppress(ZeroDivisionError), network(lab) as net:
        assert len(of(os.getpid())) == 4
        first = net.namespaces[0]
        shaped = {
            row["dev"]: row["options"]["rate"] * 8 for row in json.loads(_tc(first)) if row["kind"] == "tbf"
        }  # fmt: skip
        assert shaped == {"eth0": 25e6, "to2": 7e6}
        switch = of(os.getpid())[-1]
        ports = [row for row in json.loads(_tc(switch)) if row["kind"] == "tbf"]
        assert [row["options"]["rate"] * 8 for row in ports] == [25e6] * 3
        route = network_module.ip([f"route get {address(2)}"], namespace=first)
        assert "dev to2" in route
        raise ZeroDivisionError
    assert of(os.getpid()) == []


def _tc(namespace: str) -> str:
    return subprocess.run(
        ["tc", "-j", "-n", namespace, "qdisc", "show"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.usefixtures("can_lab")
def test_a_killed_lab_leaves_nothing(other: subprocess.Popen[str]) -> None:
    """After kill -9 of its owner."""
    assert len(of(other.pid)) == 3
    other.kill()
    other.wait()
    wait_until(lambda: not of(other.pid))


@pytest.mark.usefixtures("can_lab")
def test_what_a_lab_left_is_found_and_removed(other: subprocess.Popen[str]) -> None:
    """Where its remover was killed, too. Not while its owner lives; then the doctor names it with a repair, and the
    next lab removes it."""
    remover = Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split()
    os.kill(int(remover[0]), signal.SIGKILL)
    assert len(of(other.pid)) == 3
    with network(lab_of(hosts=1)):
        assert len(of(other.pid)) == 3
    other.kill()
    other.wait()
    left = network_module.leftovers(network_module.namespaces())
    assert set(of(other.pid)) <= set(left)
    finding = doctor.lab_finding(left, why_not=None)
    assert finding.status == "warning"
    assert all(f"ip netns del {name}" in (finding.repair or "") for name in left)
    with network(lab_of(hosts=1)):
        assert of(other.pid) == []


@pytest.mark.usefixtures("can_lab")
def test_a_signal_ends_the_lab_too(other: subprocess.Popen[str]) -> None:
    """SIGTERM in the middle: nothing is left, and the code says which signal."""
    other.send_signal(signal.SIGTERM)
    other.wait(timeout=HANG_S)
    assert (other.returncode, of(other.pid)) == (128 + signal.SIGTERM, [])


@pytest.mark.usefixtures("can_lab")
def test_no_number_of_signals_keeps_a_lab(other: subprocess.Popen[str]) -> None:
    """Ctrl-C and SIGTERM, again and again, while it is being removed."""
    while other.poll() is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            other.send_signal(number)
        time.sleep(0.002)
    wait_until(lambda: not of(other.pid))


@pytest.mark.usefixtures("can_lab")
def test_ranks_live_on_their_hosts(tmp_path: Path) -> None:
    """Two on the first, one on the second: told so, in one network each, and of no common host."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, RANK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = [tmp_path / "logs" / f"rank-0000{rank}.log" for rank in (1, 2)]
    ranks = [json.loads(text) for text in (done.stdout, *(log.read_text() for log in logs))]
    assert [(r["RANK"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"]) for r in ranks] == [
        ("0", "0", "2"), ("1", "1", "2"), ("2", "0", "1"),
    ]  # fmt: skip
    assert [r["SHOAL_HOST"] for r in ranks] == ["host-0", "host-0", "host-1"]
    assert {r["MASTER_ADDR"] for r in ranks} == {address(0)}
    assert all(r["interfaces"] == ["eth0", "lo"] and r["GLOO_SOCKET_IFNAME"] == "eth0" for r in ranks)
    assert ranks[0]["net"] == ranks[1]["net"] != ranks[2]["net"]


def test_a_name_is_of_a_process_and_its_start() -> None:
    """A process's own names are no leftovers; those of another start, of a dead one or of a zombie are."""
    mine = network_module.free_prefix([]) + "h0"
    assert network_module.leftovers([mine, "docker0", "shoal-lab-x"]) == []
    assert network_module.free_prefix([mine]) != network_module.free_prefix([])
    ticks = network_module.start_ticks(os.getpid())
    assert ticks is not None
    older = f"shoal-lab-{os.getpid()}-{ticks - 1}-0-h0"
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert network_module.start_ticks(ended.pid) is None
    dead = f"shoal-lab-{ended.pid}-1-0-switch"
    assert network_module.leftovers([older, mine, dead]) == [older, dead]
    ended.wait()


def test_without_rights_or_tools_a_sentence_says_what_works_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not root, no iproute2."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentFault, match=r"needs root .* user 1000; use sudo, or set lab.network = \"throttle\""):
        network_module.require()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentFault, match=r"no ip and no tc; apt-get install iproute2, or set lab.network"):
        network_module.require()


@pytest.mark.usefixtures("can_lab")
def test_what_the_kernel_refuses_is_named() -> None:
    """The command, its reason, and what works instead."""
    with pytest.raises(EnvironmentFault, match=r"ip refused 'link set nothing up' \(.*nothing.*\).*throttle"):
        network_module.ip(["link show lo", "link set nothing up", "link show lo"])


def test_counters_leave_out_the_loopback(tmp_path: Path) -> None:
    """They add up the others."""
    for name, sent in (("lo", 1000), ("eth0", 30), ("to1", 4)):
        (tmp_path / name / "statistics").mkdir(parents=True)
        (tmp_path / name / "statistics" / "tx_bytes").write_text(f"{sent}\n")
        (tmp_path / name / "statistics" / "tx_packets").write_text("2\n")
    assert (counted(tmp_path).bytes_sent, counted(tmp_path).packets_sent) == (34, 4)


def test_throttled_ranks_are_told_hosts_and_rates() -> None:
    """What a rank of a lab without namespaces gets: no command before its own, and the rates between hosts."""
    placed = throttled_entry(lab_of(hosts=2, ranks_per_host=2, rate_mbit=8), 3)
    assert placed.prefix == ()
    told = json.loads(placed.variables["SHOAL_LAB_RATES"])
    assert told["hosts"] == [0, 0, 1, 1]
    assert told["bytes_s"][0][1] == 1e6
    assert {name: placed.variables[name] for name in ("SHOAL_HOST", "LOCAL_RANK", "GROUP_RANK")} == {
        "SHOAL_HOST": "host-1", "LOCAL_RANK": "1", "GROUP_RANK": "1",
    }  # fmt: skip
