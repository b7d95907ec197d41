"""Ranks that only serve, and hosts that push and pull as one worker."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.assembly.run import Run
from shoal.config.check import checked
from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from shoal.sync.config import ServerConfig
from shoal.sync.server_roles import roles_of
from tests.comm.hosts import on_host
from tests.ranks import TestPlace
from tests.sync.test_server import (
    ADAM,
    AMPLIFIED,
    BATCH,
    COUNTING,
    LEAST,
    LR,
    SGD,
    STEPS,
    SUM_ORDER,
    Trained,
    distance,
    opened,
    server,
    train,
)
from tests.verification.layouts import corpus, run_file_of

Tables = dict[str, Any]
MOMENTUM: Tables = BATCH | SGD | {"optimizer": {"kind": "sgd", "momentum": 0.9, "clip_norm": None}}

DIGITS: Tables = {"model": {"kind": "mlp", "inputs": 64, "hidden": [16], "outputs": 10}, "data": {"kind": "digits"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    corpus(folder)
    return folder


def train_on_hosts(place: TestPlace, tables: Tables, folder: str, hosts: list[str]) -> Trained:
    """The same on ranks that take themselves for ranks of `hosts`."""
    with on_host(hosts[place.rank]):
        return train(place, tables, folder)


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("workers", "sync"),
    [(2, server(servers=1)), (2, server(servers=2)), (3, server("bounded", bound=0, period=4, servers=1))],
    ids=["2 + 1", "2 + 2", "3 + 1, bounded by 0"],
)
def test_dedicated_servers_make_the_steps_of_all_reduce(ranks, folder: Path, workers: int, sync: Tables) -> None:
    """With momentum, which lies at the servers alone; and all ranks end with the same bits."""
    found = ranks(workers + sync["sync"]["servers"], train, MOMENTUM | sync, str(folder))
    plain = ranks(workers, train, MOMENTUM, str(folder))[0]
    assert all(one.equal for one in found)
    assert distance(found[0].state, plain.state) < SUM_ORDER


@pytest.mark.parametrize(
    "sync",
    [
        server("async", period=6, servers=1),
        server("bounded", bound=2, period=6, servers=1),
        server("backup", backup=1, period=6, servers=1),
    ],
    ids=["async", "bounded", "backup"],
)
def test_dedicated_servers_make_the_updates_of_the_workers(ranks, folder: Path, sync: Tables) -> None:
    """A worker serves nothing; a server counts the gradients of two workers, and all agree at the end."""
    found = ranks(3, train, SGD | BATCH | sync, str(folder))
    assert all(one.equal for one in found)
    assert [one.figures[-1]["server/updates"] for one in found[:2]] == [0.0, 0.0]
    updates = found[2].figures[-1]["server/updates"]
    assert updates == (12 if sync["sync"]["admission"] == "async" else 6)
    assert found[0].agreed == found[2].agreed == [step % 6 == 0 for step in range(1, STEPS + 1)]


def forwards(place: TestPlace, tables: Tables, folder: str) -> int:
    """What this rank has counted after three steps."""
    run = opened(place, tables, folder, Path(folder) / "counting", 3)
    with closing(run.feed()) as feed:
        for step in range(1, 4):
            run.step(step, feed.next().microbatches, lr=LR)
    return int(run.model.get_buffer("forwards"))


def test_a_server_has_counted_as_often_as_its_workers(ranks, folder: Path) -> None:
    """Though it runs no forward: copies that differ would end the run before its first save."""
    assert ranks(3, forwards, SGD | BATCH | COUNTING | server(servers=1), str(folder)) == [3, 3, 3]


@pytest.mark.slow
def test_a_run_moves_to_dedicated_servers_and_back(ranks, folder: Path) -> None:
    """The moments of Adam lie in the checkpoint under the unsplit model's names, whoever held them."""
    wanted = ranks(2, train, ADAM | BATCH, str(folder))[0]
    dedicated = ADAM | BATCH | server(servers=2)
    ranks(4, train, dedicated, str(folder), 0, 5, "away", STEPS)
    ranks(2, train, ADAM | BATCH | server(), str(folder), 5, 8, "away", STEPS)
    found = ranks(4, train, dedicated, str(folder), 8, STEPS, "away")[0]
    assert distance(found.state, wanted.state) < AMPLIFIED


@pytest.mark.slow
def test_a_run_on_dedicated_servers_goes_on_bitwise(ranks, folder: Path) -> None:
    """Under synchronous admission."""
    tables = ADAM | BATCH | server(servers=1)
    whole = ranks(3, train, tables, str(folder))[0]
    ranks(3, train, tables, str(folder), 0, 7, "bitwise", STEPS)
    resumed = ranks(3, train, tables, str(folder), 7, STEPS, "bitwise")[0]
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(tensor, whole.state[name]) for name, tensor in resumed.state.items())


def read(place: TestPlace, tables: Tables, folder: str) -> tuple[int, dict[str, float]]:
    """Samples of a step that this rank trains on, and what it finds in an evaluation."""
    run: Run = opened(place, tables, folder, Path(folder) / "read", 2)
    with closing(run.feed()) as feed:
        batches = feed.next().microbatches
        run.step(1, batches, lr=LR)
    return sum(map(len, batches)), run.evaluate()


@pytest.mark.slow
def test_servers_compute_no_gradients_and_take_part_in_evaluations(ranks, folder: Path) -> None:
    """The samples of a step are the workers'; all ranks find the same loss."""
    found = ranks(3, read, MOMENTUM | DIGITS | server(servers=1), str(folder))
    assert [samples for samples, _ in found] == [6, 6, 0]
    assert found[0][1] == found[1][1] == found[2][1]
    plain = ranks(2, read, MOMENTUM | DIGITS, str(folder))
    assert found[0][1]["loss/eval"] == pytest.approx(plain[0][1]["loss/eval"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("hosts", "sync"),
    [
        (["a", "a", "b", "b"], server()),
        (["a", "a", "a", "b", "c"], server(servers=1)),
        (["a", "a", "b", "b", "b"], server("bounded", bound=0, period=4, servers=1)),
    ],
    ids=["2 hosts", "uneven hosts, a server", "a server beside its workers"],
)
def test_hybrid_makes_the_steps_of_all_reduce(ranks, folder: Path, hosts: list[str], sync: Tables) -> None:
    """A host counts what its workers count together."""
    sync = {"sync": sync["sync"] | {"topology": "hybrid"}}
    found = ranks(len(hosts), train_on_hosts, MOMENTUM | sync, str(folder), hosts)
    plain = ranks(len(hosts) - sync["sync"].get("servers", 0), train, MOMENTUM, str(folder))[0]
    assert all(one.equal for one in found)
    assert distance(found[0].state, plain.state) < SUM_ORDER


def test_asynchronous_hosts_weigh_what_their_workers_do_from_the_first_update_on(ranks, folder: Path) -> None:
    """Where every step begins at the same parameters, the updates of two uneven hosts make one step of all-reduce."""
    sync = {"sync": server("async", period=1)["sync"] | {"topology": "hybrid"}}
    found = ranks(3, train_on_hosts, SGD | BATCH | sync, str(folder), ["a", "a", "b"])
    plain = ranks(3, train, SGD | BATCH, str(folder))[0]
    assert distance(found[0].state, plain.state) < SUM_ORDER


@pytest.mark.parametrize("sync", [server("async", period=6), server("backup", backup=1, period=6)], ids=str)
def test_hybrid_counts_hosts(ranks, folder: Path, sync: Tables) -> None:
    """Two hosts of two workers make two updates a step if asynchronous; the workers of a host are never apart."""
    sync = {"sync": sync["sync"] | {"topology": "hybrid"}}
    found = ranks(4, train_on_hosts, SGD | BATCH | sync, str(folder), ["a", "a", "b", "b"])
    assert all(one.equal for one in found)
    updates = {one.figures[-1]["server/updates"] for one in found}
    assert updates == {12.0 if sync["sync"]["admission"] == "async" else 6.0}
    for first, second in ((0, 1), (2, 3)):
        for name in ("server/version", "server/counted", "server/dropped"):
            assert [f[name] for f in found[first].figures] == [f[name] for f in found[second].figures]


def bytes_between_hosts(place: TestPlace, tables: Tables, folder: str, hosts: list[str]) -> int:
    """Bytes that this rank sends by point-to-point messages in a step."""
    with on_host(hosts[place.rank]):
        run = opened(place, tables, folder, Path(folder) / "bytes", 2)
        with closing(run.feed()) as feed:
            run.mesh.ledger.take()
            result = run.step(1, feed.next().microbatches, lr=LR)
        return sum(entry.bytes_sent for name, entry in result.wire.items() if "send" in name)


def test_hybrid_pushes_once_a_host(ranks, folder: Path) -> None:
    """The second worker of a host sends no message to a server."""
    hosts, sync = ["a", "a", "b"], server(servers=1)
    direct = ranks(3, bytes_between_hosts, MOMENTUM | sync, str(folder), hosts)
    hybrid = ranks(
        3, bytes_between_hosts, MOMENTUM | {"sync": sync["sync"] | {"topology": "hybrid"}}, str(folder), hosts
    )
    assert direct[0] == direct[1] > 1000
    assert hybrid[0] == direct[0]
    assert hybrid[1] == 0


def test_roles_are_as_drawn() -> None:
    """The module's table."""
    both = roles_of(ServerConfig(), 4)
    assert (both.workers, both.servers) == ((0, 1, 2, 3), (0, 1, 2, 3))
    dedicated = roles_of(ServerConfig(servers=2), 6)
    assert (dedicated.workers, dedicated.servers) == ((0, 1, 2, 3), (4, 5))
    hybrid = roles_of(ServerConfig(servers=2, topology="hybrid"), 6, ["a", "a", "b", "b", "c", "c"])
    assert (hybrid.parties, hybrid.workers, hybrid.servers) == (((0, 1), (2, 3)), (0, 2), (4, 5))
    assert hybrid.party_of(3) == (2, 3)
    assert hybrid.party_of(4) == ()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"sync": {"servers": 2}}, "servers = 2: of 2 processes none would be left to work"),
        ({"sync": {"servers": 3}}, "servers = 3: of 2 processes none would be left to work"),
        ({"run": {"processes": 3}, "sync": {"servers": 1, "admission": "backup", "backup": 2}}, "of 2 workers none"),
        ({"run": {"processes": 4}, "sync": {"servers": 1}, "batch": {"global_samples": 4}}, "3 workers need equal"),
    ],
)
def test_roles_that_make_no_sense_are_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    tables = {"run": {"processes": 2}, "optimizer": {"clip_norm": None}, **tables}
    tables["sync"] = {"kind": "server"} | tables["sync"]
    with pytest.raises(ConfigError, match=words):
        check_across(run_file_of(tmp_path, **tables), file="server.toml")


def test_a_negative_number_of_servers_is_refused() -> None:
    """By the key's type."""
    with pytest.raises(ConfigError, match=r"sync\.servers"):
        checked(LEAST | {"sync": {"kind": "server", "servers": -1}}, RunFile, file="server.toml")


def test_as_many_backup_workers_as_hosts_are_refused() -> None:
    """When the hosts are known."""
    config = ServerConfig(admission="backup", backup=2, topology="hybrid")
    with pytest.raises(ConfigError, match=r"sync\.backup = 2, and 2 contribute"):
        roles_of(config, 4, ["a", "a", "b", "b"])
