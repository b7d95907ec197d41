"""The server's state machine with its files: every contribution counts once, wherever the server dies."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import EnvironmentFault
from shoal.federated.rounds import Opened
from shoal.federated.simulation import Simulation
from shoal.federated.transport import messages
from shoal.federated.transport.host import Host, strategy_of
from shoal.federated.transport.store import Store
from tests.federated.tasks import task
from tests.federated.transport.clients import DyingStore, LocalClient, Run, replayed

CLOSE = {"rtol": 0.0, "atol": 1e-6}
"""Clients train alone here and together in the simulation."""
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"federated": {"kind": "scaffold"}},
    "coded": {"codec": {"kind": "blockwise", "bits": 8}},
    "secret": {"secure_aggregation": {}},
    "clustered": {"federated": {"kind": "clustered"}},
    "heterofl": {"federated": {"kind": "heterofl", "widths": [1.0, 0.5, 0.25]}, "model": {"hidden": [8]}},
}


def task_of(kind: str, steps: int = 2) -> Any:
    keys = KINDS[kind]
    federated = {"clients": 3, "local_steps": 2, "deadline_s": 20.0, "evaluate_every": 9, **keys.get("federated", {})}
    return task(run={"steps": steps}, devices={"together": 1}, **{**keys, "federated": federated})


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_makes_the_models_of_the_simulation(kind: str, tmp_path: Path) -> None:
    """The same contributions, in the same order, by the same strategies and codecs."""
    simulation = Simulation(task_of(kind))
    simulation.run()
    host = Run(task_of(kind), tmp_path).play([])
    assert torch.allclose(host.server.model, simulation.server.model, **CLOSE)
    assert sum(host.rounds.turns.values()) == 6
    assert [row["counted"] for row in host.store.rows()] == [3, 3]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("scaffold", 4),
        pytest.param("scaffold", 1, marks=pytest.mark.stress),
        pytest.param("fedavg", 1, marks=pytest.mark.stress),
    ],
)
def test_a_server_killed_at_any_write_loses_nothing_and_counts_nothing_twice(
    kind: str, every: int, after: bool, tmp_path: Path
) -> None:
    """One death at every write of the run, or every fourth: the model is that of the undisturbed run, to the bit."""
    one = task_of(kind)
    undisturbed = Run(one, tmp_path / "undisturbed")
    expected = undisturbed.play([]).server.model
    writes = undisturbed.store.writes
    assert writes > 15
    for write in range(1 + after, writes + 1, every):
        run = Run(one, tmp_path / str(write))
        host = run.play([write], after=after)
        assert run.starts == 2, write
        assert torch.equal(host.server.model, expected), write
        assert sum(host.rounds.turns.values()) == 6


@pytest.mark.slow
def test_norms_that_weigh_clients_survive_the_server(tmp_path: Path) -> None:
    """Two of three clients are drawn by importance; killed at every third write, the server draws the same ones."""
    keys = {"clients": 3, "cohort": 2, "least": 2, "sampling": "importance", "local_steps": 2, "evaluate_every": 9}
    one = task(run={"steps": 4}, devices={"together": 1}, federated=keys)
    undisturbed = Run(one, tmp_path / "undisturbed")
    expected = undisturbed.play([])
    assert len(expected.rounds.norms) == 3
    simulation = Simulation(one)
    simulation.run()
    assert torch.allclose(expected.server.model, simulation.server.model, **CLOSE)
    for write in range(2, undisturbed.store.writes + 1, 3):
        host = Run(one, tmp_path / str(write)).play([write])
        assert torch.equal(host.server.model, expected.server.model), write
        assert host.rounds.norms == expected.rounds.norms


def schedule(seed: int, kind: str, directory: Path) -> None:
    """Several deaths at random writes, before and after them."""
    draw = random.Random(seed)
    one = task_of(kind, steps=3)
    run = Run(one, directory / f"{kind}-{seed}")
    deaths = [draw.randint(1, 12) for _ in range(draw.randint(1, 6))]
    host = run.play(deaths, after=draw.random() < 0.5)
    passed = len({sentence.partition(":")[0] for sentence in run.told if "passes without an update" in sentence})
    assert sum(host.rounds.turns.values()) == 3 * (3 - passed), (seed, deaths)
    assert host.rounds.version == 3
    if not passed:
        expected = Run(one, directory / f"{kind}-{seed}-plain").play([]).server.model
        assert torch.equal(host.server.model, expected), (seed, deaths)


@pytest.mark.parametrize("kind", ["fedavg", "secret"])
def test_random_deaths_of_the_server(kind: str, tmp_path: Path) -> None:
    """Secret sums, too: a round that dies while secrets are revealed passes, and no other is wrong."""
    for seed in range(2):
        schedule(seed, kind, tmp_path)


def kill_both_ends(seed: int, kind: str, directory: Path) -> None:
    """The server dies at random writes, clients in any phase: the model is that of the contributions that counted, each
    from its version and once, and a client keeps what belongs to them. Secret sums are exact up to quantisation."""
    draw = random.Random(seed)
    one = task_of(kind, steps=3)
    run = Run(one, directory / f"{kind}-{seed}-both", kills=random.Random(seed), chance=draw.choice((0.02, 0.1)))
    deaths = [draw.randint(1, 12) for _ in range(draw.randint(0, 4))]
    host = run.play(deaths, after=draw.random() < 0.5)
    used, where = host.rounds.used, (seed, deaths, run.killed, run.told)
    assert host.rounds.turns == Counter(ticket.client for ticket in used), where
    expected = replayed(one, used)
    assert torch.allclose(host.server.model, expected, rtol=0.0, atol=2e-5 if kind == "secret" else 0.0), where


@pytest.mark.parametrize("kind", ["scaffold", "secret", "clustered", "heterofl"])
def test_random_kills_of_the_server_and_of_clients(kind: str, tmp_path: Path) -> None:
    kill_both_ends(3, kind, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("first", range(100, 150, 10))
@pytest.mark.parametrize("kind", KINDS)
def test_ten_random_schedules_of_deaths(kind: str, first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        schedule(seed, kind, tmp_path)
        kill_both_ends(seed, kind, tmp_path)


def test_a_client_with_another_run_file_is_refused(tmp_path: Path) -> None:
    one = task_of("fedavg")
    others = [task(**keys) for keys in ({"precision": {"kind": "float64"}}, {"run": {"seed": 4}}, {})]
    assert len({strategy_of(other) for other in others}) == 3
    host = Host(one, DyingStore(tmp_path), clock=lambda: 0.0)
    layout, strategy = one.trainer.layout.fingerprint, strategy_of(one)
    for said, what in (
        (messages.Join(5, "other", strategy), "another model"),
        (messages.Join(5, layout, "other"), "another [federated]"),
    ):
        answer = host.join("x", said)
        assert isinstance(answer, messages.Refusal)
        assert what in answer.sentence
    for name in "abc":
        host.join(name, messages.Join(5, layout, strategy))
    answer = host.join("d", messages.Join(5, layout, strategy))
    assert isinstance(answer, messages.Refusal)
    assert "one more than federated.clients = 3" in answer.sentence


def test_a_silent_client_is_not_waited_for(tmp_path: Path) -> None:
    """Two of three contribute; the round ends when the third has been silent for long enough."""
    one, now = task_of("fedavg"), [0.0]
    told: list[str] = []
    host = Host(one, DyingStore(tmp_path / "s"), clock=lambda: now[0], told=told.append, silence_s=5.0)
    clients = [LocalClient(one, number, tmp_path / "c") for number in range(3)]
    for client in clients:
        client.join(host)
    for client in clients[:2]:
        client.act(host)
    assert host.tick() is None
    now[0] = 6.0
    for client in clients[:2]:
        host.alive(client.name)
    ready = host.tick()
    assert ready is not None
    assert [ticket.client for ticket in ready] == [client.name for client in clients[:2]]
    assert told == ["client client-000002 has been silent for 5 s: nobody waits for it"]


def test_a_private_round_that_too_few_take_part_in_passes_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accountant assumes that each client takes part by itself with one chance: no cohort is drawn again, be it too
    small or its clients too silent."""
    monkeypatch.setattr("shoal.federated.transport.host.secrets.randbits", lambda _: 1)
    one = task(
        run={"steps": 8},
        devices={"together": 1},
        federated={"clients": 4, "cohort": 2, "least": 2, "local_steps": 1, "weights": "equal", "evaluate_every": 9},
        privacy={"noise": 4.0, "epsilon": 50.0, "noise_by": "clients"},
        secure_aggregation={"bits": 24},
    )
    run = Run(one, tmp_path)
    host = run.play([])
    store = Store(tmp_path / "server")
    drawn = [made for made in store.journal.read() if isinstance(made, Opened)]
    store.journal.close()
    assert [(made.version, made.attempt) for made in drawn] == [(version, 0) for version in range(8)]
    small = [made for made in drawn if len(made.cohort) < 2]
    assert 0 < len(small) < 8
    assert len(run.told) == len(small)
    rows = host.store.rows()
    assert [row["round"] for row in rows] == list(range(1, 9))
    assert [row["counted"] for row in rows] == [len(m.cohort) if m not in small else 0 for m in drawn]
    assert host.budget is not None
    assert [row["values"]["privacy/epsilon"] for row in rows] == [host.budget.spent(n) for n in range(1, 9)]


def test_two_servers_of_one_folder_are_refused(tmp_path: Path) -> None:
    first = DyingStore(tmp_path)
    with pytest.raises(EnvironmentFault, match="belongs to one federated server"):
        DyingStore(tmp_path)
    first.journal.close()
