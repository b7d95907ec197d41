"""What the ledger counts is what is sent: closed forms, and in a lab what Gloo puts on each line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.collectives.algorithms import tables
from shoal.collectives.table import Kind
from shoal.comm.algorithms.choose import bytes_between
from shoal.comm.collective import Collective, Handle, Reduction
from shoal.comm.ledger import Sent
from shoal.comm.two_levels import TwoLevels, division_of
from shoal.comm.volume import Volume, bytes_sent, traffic_of, wire_bytes
from tests.comm.local import local_group
from tests.launcher.labs import can_lab

__all__ = ["can_lab"]
S = 1 << 20
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
WIRE_TOLERANCE = 0.01
"""Gloo's own 48 bytes a message, and sizes that its segments do not divide."""


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_a_collective_needs_is_sent(operation: str, size: int) -> None:
    """Of all ranks together, at least the least that any algorithm needs; nobody sends to itself."""
    least = {
        "all_reduce": 2 * (size - 1) * S, "reduce_scatter": (size - 1) * S, "all_gather": size * (size - 1) * S,
        "all_to_all": (size - 1) * S, "scatter": (size - 1) * S // size,
    }.get(operation, (size - 1) * S)  # fmt: skip
    for backend in ("gloo", "shm", "nccl"):
        for root in (0, size - 1):
            rows = [traffic_of(operation, S, rank=r, size=size, backend=backend, peer=root) for r in range(size)]
            assert all(rank not in row for rank, row in enumerate(rows))
            whole = sum(sum(row.values()) for row in rows)
            assert whole >= least - size * size, backend
            if (operation, backend) not in (("reduce_scatter", "gloo"), ("reduce", "gloo"), ("reduce", "shm")):
                assert whole <= least, backend


def test_a_broadcast_reaches_every_rank_once() -> None:
    """From any root: each rank but the root gets it from exactly one other."""
    for size in range(2, 18):
        for root in range(size):
            reached = [to for r in range(size) for to in traffic_of("broadcast", 1, rank=r, size=size, backend="gloo",
                                                                    peer=root)]  # fmt: skip
            assert sorted([*reached, root]) == list(range(size))


def test_levels_follow_the_hosts() -> None:
    """A ring over two hosts of two: the ranks at the border send to the other host, the others inside."""
    hosts = ("a", "a", "b", "b")
    rows = [Volume("gloo", rank, hosts)("all_reduce", S) for rank in range(4)]
    half = 3 * S // 2
    assert rows == [Sent(0, half), Sent(half, 0), Sent(0, half), Sent(half, 0)]
    assert Volume("gloo", 1, hosts)("send", 10, peer=0) == Sent(10, 0)
    assert Volume("gloo", 1, hosts)("send", 10, peer=2) == Sent(0, 10)
    assert Volume("gloo", 0, hosts)("all_to_all", 100, parts=[5, 3, 1, 1]) == Sent(30, 20)
    assert Volume("gloo", 0, hosts)("barrier", 0) == Volume("gloo", 0, hosts)("recv", 9, peer=1) == Sent()


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b"), ("a", "b", "a", "c", "c", "c")])
def test_two_levels_send_between_hosts_what_their_closed_forms_say(hosts: tuple[str, ...]) -> None:
    """2 (m-1) S, (m-1) S, (m-1) n S, (m-1) S in all, from leaders alone; inside, no less than memory needs."""
    n, m = len(hosts), len(set(hosts))
    forms = {"all_reduce": 2 * (m - 1) * S, "reduce_scatter": (m - 1) * S, "all_gather": (m - 1) * n * S,
             "broadcast": (m - 1) * S, "reduce": (m - 1) * S}  # fmt: skip
    for operation, form in forms.items():
        rows = [Volume("hierarchical", rank, hosts)(operation, S, peer=n - 1) for rank in range(n)]
        assert sum(row.between_bytes for row in rows) == pytest.approx(form, abs=n)
        leaders = {hosts.index(host) for host in hosts}
        assert all(rank in leaders or row.between_bytes == 0 for rank, row in enumerate(rows)), operation


class Recorded:
    """The ranks of a host: what is asked of them, (operation, bytes, root) in the terms of `volume`."""

    def __init__(self, inner: Collective) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size
        self.calls: list[tuple[str, int, int]] = []

    def reduce(self, tensor: Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        self.calls.append(("reduce", tensor.nbytes, root))
        return self._inner.reduce(tensor, op, root=root)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> Handle:
        self.calls.append(("broadcast", tensor.nbytes, root))
        return self._inner.broadcast(tensor, root=root)

    def gather(self, outputs: Sequence[Tensor], input: Tensor, *, root: int = 0) -> Handle:
        self.calls.append(("gather", input.nbytes, root))
        return self._inner.gather(outputs, input, root=root)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], *, root: int = 0) -> Handle:
        self.calls.append(("scatter", output.nbytes * self.size, root))
        return self._inner.scatter(output, inputs, root=root)

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Handle:
        self.calls.append(("send", tensor.nbytes, to))
        return self._inner.send(tensor, to=to, tag=tag)

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Handle:
        return self._inner.recv(tensor, source=source, tag=tag)

    def sent(self) -> int:
        """Bytes of all calls so far, which are forgotten."""
        calls, self.calls = self.calls, []
        rows = [traffic_of(o, n, rank=self.rank, size=self.size, backend="shm", peer=to) for o, n, to in calls]
        return sum(sum(row.values()) for row in rows)


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b"), ("a", "b", "a", "b", "a", "b")])
@pytest.mark.parametrize("root", [0, 1, 3])
def test_two_levels_send_inside_hosts_what_is_counted(hosts: tuple[str, ...], root: int) -> None:
    """Each rank's calls through shared memory, as they are made, against the count; a root that leads nobody gets the
    result from its leader."""
    n, numbers, division = len(hosts), 24 * len(hosts), division_of(hosts)
    mates = {
        rank: group for ranks in division.hosts for rank, group in zip(ranks, local_group(len(ranks)), strict=True)
    }
    leaders = {ranks[0]: group for ranks, group in zip(division.hosts, local_group(len(division.hosts)), strict=True)}

    def run(rank: int) -> dict[str, int]:
        recorded, sent = Recorded(mates[rank]), {}
        levels = TwoLevels(rank, division, recorded, leaders.get(rank))  # type: ignore[arg-type]
        whole = torch.ones(numbers)
        for name, call in {
            "all_reduce": lambda: levels.all_reduce(whole, "sum"),
            "reduce": lambda: levels.reduce(whole, "sum", root=root),
            "reduce_scatter": lambda: levels.reduce_scatter(torch.empty(numbers // n), whole, "sum"),
            "all_gather": lambda: levels.all_gather(torch.empty(n * numbers), whole),
            "broadcast": lambda: levels.broadcast(whole, root=root),
        }.items():
            call()
            sent[name] = recorded.sent()
        return sent

    with ThreadPoolExecutor(n) as threads:
        for rank, found in enumerate(threads.map(run, range(n))):
            volume = Volume("hierarchical", rank, hosts)
            assert found == {name: volume(name, 4 * numbers, peer=root).inside_bytes for name in found}, rank


def test_the_result_handed_to_a_root_is_counted() -> None:
    """Two hosts of two: rank 0 leads rank 1, and gives it the whole."""
    hosts = ("a", "a", "b", "b")
    rooted = [Volume("hierarchical", 0, hosts)("reduce", S, peer=root).inside_bytes for root in (0, 1, 2)]
    assert rooted == [S // 2, S // 2 + S, S // 2]


def test_what_two_levels_leave_to_gloo_is_counted_as_gloo_s() -> None:
    """An all-reduce that is said to be Gloo's goes around its ring."""
    hosts = ("a", "a", "b", "b")
    for rank in range(4):
        left = Volume("hierarchical", rank, hosts)("all_reduce", S, as_gloo=True)
        assert left == Volume("gloo", rank, hosts)("all_reduce", S)
        assert left != Volume("hierarchical", rank, hosts)("all_reduce", S)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"])
def test_what_a_table_makes_is_counted_by_the_table(kind: Kind) -> None:
    """Over all ranks and algorithms: the bytes between hosts are those that the cost walk finds."""
    hosts = (0, 1, 1, 0, 2, 2)
    for table in tables(kind, 6, local=2):
        volumes = [Volume("gloo", r, [str(h) for h in hosts], tables=lambda *_: table) for r in range(6)]  # noqa: B023
        payload = 60 * table.chunks
        whole = payload * 6 if kind == "all_gather" else payload
        between = sum(volume(kind, payload).between_bytes for volume in volumes)
        assert between == pytest.approx(bytes_between(table, whole, hosts), abs=36), table.name


def test_headers_are_a_24th_of_a_packet_of_ethernet() -> None:
    """1448 bytes travel in 1514; a packet of 16 KiB has the same 66 bytes once."""
    assert wire_bytes(1448) == pytest.approx(1514)
    assert wire_bytes(S, packet_bytes=16 << 10) / S == pytest.approx(1.004, abs=2e-4)


def test_a_mean_is_over_the_ranks() -> None:
    """Of a broadcast the root sends, of a gather the others: one rank sends (n-1)/n S on average."""
    assert bytes_sent("broadcast", 400, size=4, backend="gloo") == bytes_sent("gather", 400, size=4, backend="gloo")
    assert bytes_sent("broadcast", 400, size=4, backend="gloo") == 300


RANK = """
import json, os, sys, time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from shoal.comm.collective import GroupCollective
from shoal.launcher.environment import place_from
from shoal.launcher.orphans import die_with_parent
from shoal.launcher.rendezvous import open_store
die_with_parent(os.environ)
place = place_from(os.environ)
torch.set_num_threads(1)
store = open_store(place, os.environ, timeout_s=180)
n, rank, root = place.world_size, place.rank, 1
group = GroupCollective(dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, n, timedelta(seconds=60)))
COUNT = int(sys.argv[1])
x, part, whole = torch.ones(COUNT), torch.empty(COUNT // n), torch.empty(COUNT * n)
many = [torch.empty(COUNT) for _ in range(n)]
calls = {
    "all_reduce": lambda: group.all_reduce(x),
    "reduce_scatter": lambda: group.reduce_scatter(part, x),
    "all_gather": lambda: group.all_gather(whole, x),
    "all_to_all": lambda: group.all_to_all(torch.empty(COUNT), x),
    "broadcast": lambda: group.broadcast(x, root=root),
    "reduce": lambda: group.reduce(x, root=root),
    "gather": lambda: group.gather(many if rank == root else [], x, root=root),
    "scatter": lambda: group.scatter(part, list(x.chunk(n)) if rank == root else [], root=root),
    "send": lambda: group.send(x, to=root) if rank == 0 else group.recv(x, source=0) if rank == root else None,
}
def counted():
    lines = {}
    for path in Path("/sys/class/net").glob("to*/statistics"):
        bytes_, packets = (int((path / name).read_text()) for name in ("tx_bytes", "tx_packets"))
        lines[int(path.parent.name[2:])] = bytes_ - 66 * packets
    return lines
def meet(key):
    store.add(key, 1)
    while store.add(key, 0) < n:
        time.sleep(0.005)
found = {}
for name, call in calls.items():
    least = {}  # of several turns: what is sent again only adds, as does the opening of connections
    for turn in range(10):
        meet(f"{name}-{turn}")
        time.sleep(0.06)
        before = counted()
        meet(f"{name}-{turn}-go")
        handle = call()
        if handle is not None:
            handle.wait()
        meet(f"{name}-{turn}-done")
        sent = {to: bytes_ - before[to] for to, bytes_ in counted().items()}
        least = {to: min(bytes_, least.get(to, bytes_)) for to, bytes_ in sent.items()}
    found[name] = least  # the store's own bytes are in it, too: a few hundred
store.set(f"found/{rank}", json.dumps(found))
if rank == 0:
    print(json.dumps([json.loads(store.get(f"found/{r}")) for r in range(n)]), flush=True)
if rank == 0:  # it serves the store, so it is the last to leave
    while store.add("gone", 0) < n - 1:
        time.sleep(0.005)
else:
    with suppress(dist.DistNetworkError):  # or rank 0 has gone before it answered
        store.add("gone", 1)
"""
LAUNCH = """
import os, sys
from itertools import combinations
from pathlib import Path
from shoal.launcher.lab.lab_file import lab_from
from shoal.launcher.lab.network import run_in_lab
links = [{"between": list(pair), "rate_mbit": 10_000} for pair in combinations(range(4), 2)]
lab = lab_from({"lab": {"hosts": 4, "rate_mbit": 10_000, "burst_kib": 256}, "link": links}, file="lab")
sys.exit(run_in_lab(lab, [sys.executable, *sys.argv[1:3]], run_directory=Path(sys.argv[3]), environ=os.environ))
"""


@pytest.mark.stress
@pytest.mark.usefixtures("can_lab")
def test_gloo_sends_what_the_table_says(tmp_path: Path) -> None:
    """Four hosts, every two joined by a line of their own: per operation, rank and receiver, the kernel's count."""
    count = 600_000
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "rank.py"), str(count), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    payload = 4 * count
    slack = WIRE_TOLERANCE * payload
    for rank, operations in enumerate(found):
        for operation, lines in operations.items():
            peer = 1 if operation != "send" or rank == 0 else rank
            mine = operation if operation != "send" or rank == 0 else "recv"
            form = traffic_of(mine, payload, rank=rank, size=4, backend="gloo", peer=peer)
            for to, sent in lines.items():
                assert sent == pytest.approx(form.get(int(to), 0), abs=slack), (operation, rank, to, lines, dict(form))
