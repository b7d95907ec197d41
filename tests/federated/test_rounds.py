"""The state machine of rounds: what counts, what is late, when a round ends, and that its history is its state."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shoal.federated.config import FedAvgConfig, FedBuffConfig
from shoal.federated.rounds import Decision, Rounds, Ticket


def rounds_of(**keys: Any) -> Rounds:
    config = FedAvgConfig(**{"clients": 4, "deadline_s": 10.0, **keys})
    found = Rounds(config, versions=3, seed=1)
    for name in "abcd":
        found.join(name, 5)
    return found


def test_a_ticket_counts_once_and_only_in_its_round() -> None:
    rounds = rounds_of(least=1)
    tickets = {name: rounds.ask(name, 0.0) for name in "abcd"}
    first = tickets["a"]
    assert first is not None
    assert rounds.contribute(first, "x", 0.0) == "counted"
    assert rounds.contribute(first, "x", 0.0) == "again"
    assert rounds.ask("a", 0.0) is None
    assert rounds.contribute(Ticket("b", 1, 0), "x", 0.0) == "unknown"
    assert rounds.contribute(Ticket("z", 0, 0), "x", 0.0) == "unknown"
    assert rounds.tick(9.0) is None
    ready = rounds.tick(10.0)
    assert ready == (first,)
    rounds.advance(10.0, ready)
    assert rounds.contribute(first, "x", 11.0) == "again"
    late = tickets["b"]
    assert late is not None
    assert rounds.contribute(late, "x", 11.0) == "late"


def test_a_round_ends_with_the_first_of_those_asked_beyond_the_cohort() -> None:
    rounds = rounds_of(cohort=2, over_selection=1.0)
    tickets = [ticket for name in "dcba" if (ticket := rounds.ask(name, 0.0)) is not None]
    assert len(tickets) == 4
    assert [rounds.contribute(ticket, "", 0.0) for ticket in tickets] == ["counted", "counted", "late", "late"]
    assert rounds.tick(0.0) == tuple(sorted(tickets[:2]))


def test_a_round_with_too_few_is_tried_again_and_none_of_it_counts() -> None:
    rounds = rounds_of(least=3)
    old = rounds.ask("a", 0.0)
    assert old is not None
    rounds.contribute(old, "", 0.0)
    assert rounds.tick(10.0) is None
    assert rounds.attempt == 1
    new = rounds.ask("a", 11.0)
    assert new == Ticket("a", 0, 1)
    assert rounds.contribute(old, "", 11.0) == "late"


def test_who_left_or_was_refused_is_not_waited_for_and_may_come_back() -> None:
    rounds = rounds_of(least=1)
    tickets = {name: rounds.ask(name, 0.0) for name in "abcd"}
    for name in "ab":
        ticket = tickets[name]
        assert ticket is not None
        rounds.contribute(ticket, "", 0.0)
    rounds.refuse("c")
    assert rounds.tick(0.0) is None
    rounds.leave("d")
    assert rounds.tick(0.0) is not None
    rounds.join("d", 5)
    assert rounds.tick(0.0) is None
    assert rounds.ask("d", 0.0) == tickets["d"]
    assert rounds.ask("c", 0.0) is None


def state_of(rounds: Rounds) -> Any:
    one = rounds.open
    counted = None if one is None else (one.attempt, one.cohort, one.counted, one.revealing)
    return rounds.version, rounds.attempt, counted, rounds.buffer, rounds.given, rounds.turns, rounds.last, rounds.used


@pytest.mark.parametrize("kind", ["rounds", "any time"])
def test_the_history_of_a_random_run_gives_its_state(kind: str) -> None:
    """After every event, a machine that is given the decisions so far is where the first one is."""
    config = FedAvgConfig(clients=4, least=2) if kind == "rounds" else FedBuffConfig(clients=4, buffer=3, stalest=1)
    for seed in range(20):
        draw, history = random.Random(seed), list[Decision]()
        rounds, now_s, held = Rounds(config, versions=4, seed=seed), 0.0, list[Ticket]()
        while not rounds.over and now_s < 100_000:
            now_s += draw.random() * 100
            name = draw.choice("abcd")
            act = draw.randrange(5)
            if act == 0:
                rounds.join(name, 5)
            elif act == 1:
                held += [ticket] if (ticket := rounds.ask(name, now_s)) is not None else []
            elif act == 2 and held:
                rounds.contribute(draw.choice(held[-6:]), "d", now_s)
            elif act == 3 and kind == "rounds":
                rounds.refuse(name) if draw.random() < 0.1 else rounds.leave(name) if draw.random() < 0.1 else None
            elif (ready := rounds.tick(now_s)) is not None:
                rounds.advance(now_s, ready)
            history += rounds.decisions()
            again = Rounds(config, versions=4, seed=seed, history=history)
            assert state_of(again) == state_of(rounds), (seed, act)
        assert rounds.over


def test_norms_that_weigh_clients_are_in_the_history() -> None:
    """A server that starts again draws the clients that it would have drawn, each with the same chance."""
    rounds = rounds_of(sampling="importance", cohort=2)
    history: list[Decision] = []
    tickets = {n: t for n in "abcd" if (t := rounds.ask(n, 0.0)) is not None}
    for ticket in tickets.values():
        rounds.contribute(ticket, "", 0.0)
    ready = rounds.tick(0.0)
    assert ready is not None
    assert all(0 < rounds.chance_of(name) < 1 for name in tickets)
    rounds.advance(0.0, ready, [9.0, 1.0])
    history += rounds.decisions()
    again = Rounds(rounds.config, versions=3, seed=1, history=history)
    for name in "abcd":
        again.join(name, 5)
    for one in (rounds, again):
        one.begin(1.0)
    assert again.norms == rounds.norms == dict(zip((t.client for t in ready), (9.0, 1.0), strict=True))
    assert again.open is not None
    assert rounds.open is not None
    assert again.open.chances == rounds.open.chances
    opened = history[0]
    assert Rounds(rounds.config, versions=3, seed=1, history=[opened]).chance_of("a") == (
        dict(zip(opened.cohort, opened.chances, strict=True)).get("a", 1.0)  # type: ignore[union-attr]
    )
