"""Membership under random faults, and rule by rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.resilience import events as ev
from shoal.resilience.detection import cut_off
from shoal.resilience.ledger import audit
from shoal.resilience.membership import FRUITLESS, Membership, Rules
from shoal.resilience.participant import FencedOut, Participant
from tests.resilience.simulator import World, exchange, exchange_all, play, ready, step

SEEDS_PER_TEST = 150


@pytest.mark.matrix(first=3)
@pytest.mark.parametrize("first", range(0, 10 * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_random_faults_break_no_rule(first: int) -> None:
    """Each position is used once by every state, no generation takes a step beside a newer one, and steps are taken
    again when faults end; the simulator states the rules."""
    for seed in range(first, first + SEEDS_PER_TEST):
        play(seed)


@pytest.mark.stress
@pytest.mark.parametrize("first", range(0, 100_000, 1000))
def test_random_faults_break_no_rule_in_100_000_worlds(first: int) -> None:
    """As above."""
    for seed in range(first, first + 1000):
        play(seed)


@pytest.mark.slow
def test_5000_ranks_lose_some_and_go_on() -> None:
    """625 replicas of 8 ranks: two are lost while they train, and the others and a spare take more steps."""
    world = World(1, faults=0.0, replicas=625, ranks=8)
    world.rules = Rules(600, 625, silence_s=5, accept_s=20, start_s=4)
    world.coordinator = Membership(world.rules, 0)
    world.delay, world.loss = 0, 0.0
    world.run(20)
    assert len(world.coordinator.members) == 625
    before = world.coordinator.ledger.step
    assert before > 0
    for name in ("r17", "r400"):
        world.processes[name].alive = False
    world.run(25)
    assert {"r17", "r400"}.isdisjoint(world.coordinator.members)
    assert len(world.coordinator.members) >= 623
    assert world.coordinator.ledger.step > before
    assert audit(world.history).redone == 0


class FormsAlone(Membership):
    """Planted: silence is taken for death, and nobody has to promise."""

    def _may_form(self, wanted: tuple[str, ...]) -> bool:
        if self.generation == 0:
            return super()._may_form(wanted)
        return len(wanted) >= self.rules.minimum and all(self._accepted(self.replicas[name]) for name in wanted)


class ForgetsItsNumber(Membership):
    """Planted: a proposal is not written down."""

    def _decide(self, decision: ev.Decision) -> None:
        super()._decide(decision)
        self._made = [made for made in self._made if not isinstance(made, ev.Proposed | ev.Fenced)]


class TakesAnyState(Membership):
    """Planted: whoever says that it has a state is believed."""

    def _accept(self, event: ev.Accept, replica: object) -> ev.Refusal | None:
        replica = self.replicas[event.replica]
        if event.number == self.number:
            replica.accepted = event
            if event.step is not None:
                replica.reported = event.step
        return None


class CommitsTooEarly(Membership):
    """Planted: a step counts when one replica has reported it."""

    def _commit(self, event: ev.Report, votes: dict[str, ev.Report]) -> None:
        super()._commit(ev.Report(event.replica, event.generation, event.step, event.start, event.stop + 1), votes)


@pytest.mark.parametrize("planted", [FormsAlone, ForgetsItsNumber, TakesAnyState, CommitsTooEarly])
def test_the_simulator_finds_planted_faults(planted: Callable[..., Membership]) -> None:
    """A machine that breaks a rule is found within a few hundred worlds."""

    def search() -> None:
        for seed in range(400):
            play(seed, membership_of=planted)

    with pytest.raises((AssertionError, ValueError, FencedOut)):
        search()


def test_a_step_is_committed_when_all_members_have_reported_it() -> None:
    """And not when some have."""
    machine, parts = ready(3)
    for index, part in enumerate(parts.values()):
        assert machine.ledger.step == 0, index
        part.applied(stop=8)
        part.hear(machine.handle(part.unsent()[-1], 0).answer)
    assert (machine.ledger.step, machine.ledger.position) == (1, 8)


def test_the_newest_state_goes_on_when_its_last_step_reached_one_member_only() -> None:
    """A member that has applied a step is the holder; the others copy its state, and no sample is used again."""
    machine, parts = ready(3)
    step(machine, parts)
    parts["r1"].applied(stop=16)
    machine.handle(ev.Ended("r0"), 1)
    rest = {name: parts[name] for name in ("r1", "r2")}
    for part in rest.values():
        part.hear(machine.handle(ev.Look(), 1).answer)
    exchange_all(machine, rest, 1)
    view = machine.view()
    assert (view.members, view.holders, view.step, view.position) == (("r1", "r2"), ("r1",), 2, 16)
    assert (rest["r1"].enter(), rest["r2"].enter()) == ("here", "peer")
    assert machine.ledger.redone == 0


def test_a_silent_replica_alone_does_not_let_others_begin() -> None:
    """A spare must not begin beside a generation that may still be running; the launcher's word lets it."""
    machine, parts = ready(1)
    step(machine, parts)
    spare = Participant("spare")
    exchange(machine, spare, 4)
    machine.tick(7)
    exchange_all(machine, {"spare": spare}, 8)
    assert (machine.number, machine.generation) == (2, 1)
    machine.handle(ev.Ended("r0"), 9)
    assert (machine.view().members, machine.view().holders) == (("spare",), ())


def test_a_replica_that_was_stopped_returns_to_find_itself_fenced() -> None:
    """Its report is refused, and it applies nothing more."""
    machine, parts = ready(2)
    machine.handle(ev.Heartbeat("r1", 0), 8)
    machine.tick(9)
    answer = machine.handle(ev.Report("r0", 1, 1, 0, 8), 9).answer
    assert isinstance(answer, ev.Refusal)
    assert answer.fenced
    assert "rank 0 was silent for 9.0 s" in answer.sentence
    parts["r0"].hear(answer)
    with pytest.raises(FencedOut, match="join again under a new name"):
        parts["r0"].applied(stop=8)


def lose(machine: Membership, parts: dict[str, Participant], suspects: dict[str, list[str]]) -> None:
    """A generation comes to nothing, and each says whom it cannot reach."""
    for name, part in parts.items():
        if not part.fenced:
            part.failed([each for each in suspects[name] if each in machine.members])
    for _ in range(3):
        exchange_all(machine, parts)
    for part in parts.values():
        if part.may_enter and part.enter() != "here":
            part.ready(step=machine.formed_step, position=machine.formed_position)
    exchange_all(machine, parts)


def test_of_replicas_that_cannot_reach_each_other_the_most_suspected_goes() -> None:
    """All reach the coordinator, and `b` and `c` not each other: after some generations without a step one of the two
    is fenced, and the others go on. A generation with a step between clears everybody."""
    machine, parts = ready(3)
    suspects = {"r0": [], "r1": ["r2"], "r2": ["r1"]}

    for _ in range(FRUITLESS - 1):
        lose(machine, parts, suspects)
    step(machine, parts)
    for _ in range(FRUITLESS):
        assert not machine.fenced
        lose(machine, parts, suspects)
    lose(machine, parts, suspects)
    assert set(machine.fenced) == {"r2"}
    assert "its peers cannot reach it" in machine.fenced["r2"].reason
    assert machine.members == ("r0", "r1")


OUT, IN, BOTH = "way out", "way in", "both"


def suspects_of(count: int, member: int, broken: str) -> dict[str, list[str]]:
    """Whom each of `count` members cannot reach, where one's own way out, in, or both are broken."""
    names, cut = [f"r{index}" for index in range(count)], f"r{member}"
    others = [name for name in names if name != cut]
    said = {name: [] if broken == OUT else [cut] for name in others}
    return {**said, cut: [] if broken == IN else others}


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("broken", [OUT, IN, BOTH])
def test_of_three_or_more_the_one_that_is_cut_off_goes(count: int, broken: str) -> None:
    """Whichever it is, and whichever of its ways is broken."""
    names = [f"r{index}" for index in range(count)]
    for member in range(count):
        name, why = cut_off(names, suspects_of(count, member, broken)) or ("", "")
        assert name == f"r{member}"
        assert why.startswith("it cannot reach r" if broken == OUT else "its peers cannot reach it")


@pytest.mark.parametrize(
    ("count", "said", "gone"),
    [
        (2, {"r0": ["r1"]}, "r1"),
        (2, {"r1": ["r0"]}, "r0"),
        (2, {"r0": ["r1"], "r1": ["r0"]}, "r1"),
        (3, {"r2": ["r0"]}, "r0"),
        (3, {"r0": ["r1"], "r1": ["r0"]}, "r1"),
        (4, {"r3": ["r0"], "r1": ["r0"]}, "r0"),
        (4, {"r0": ["r2", "r3"], "r1": ["r2", "r3"], "r2": ["r0", "r1"], "r3": ["r0", "r1"]}, "r3"),
        (4, {"r0": ["r1"], "r1": ["r0"], "r2": ["r3"]}, "r3"),
        (3, {"r0": ["r7"], "r7": ["r0", "r1"]}, None),
        (3, {"r0": ["r0"]}, None),
        (3, {}, None),
    ],
)
def test_of_equals_the_most_suspected_goes_and_then_the_last(
    count: int, said: dict[str, list[str]], gone: str | None
) -> None:
    """One broken link, two, halves that cannot reach each other; names of none of the members do not count."""
    found = cut_off([f"r{index}" for index in range(count)], said)
    assert (found and found[0]) == gone


def test_one_host_without_a_way_out_leaves_the_others_training() -> None:
    """It suspects all others, which suspect nobody: it is the only one that is fenced."""
    machine, parts = ready(4)
    for _ in range(20):
        lose(machine, parts, suspects_of(4, 0, OUT))
        if "r0" in machine.fenced:
            break
    step(machine, {name: parts[name] for name in ("r1", "r2", "r3")})
    assert set(machine.fenced) == {"r0"}
    assert "it cannot reach r1, r2, r3: " in machine.fenced["r0"].reason
    assert (machine.members, machine.ledger.step) == (("r1", "r2", "r3"), 1)


def test_a_suspect_is_named_though_another_generation_is_proposed_already() -> None:
    """Peers notice a loss one after the other: who learns late whom it cannot reach still says so, until the next
    generation begins."""
    machine, parts = ready(2)
    parts["r0"].failed()
    exchange(machine, parts["r0"])
    late = parts["r1"]
    late.hear(machine.handle(ev.Look(), 0).answer)
    late.failed(["r0"])
    late.hear(machine.handle(ev.Heartbeat("r1", 0), 0).answer)
    assert ev.Broken("r1", late.generation, ("r0",)) in late.unsent()
    exchange_all(machine, parts)
    assert late.enter() == "here"
    assert not [event for event in late.unsent() if isinstance(event, ev.Broken)]


def test_who_has_promised_applies_no_step_of_an_earlier_generation() -> None:
    """The promise binds the replica itself, before anybody hears of it."""
    machine, parts = ready(1, maximum=2)
    exchange(machine, Participant("r9"))
    parts["r0"].hear(machine.handle(ev.Look(), 0).answer)
    assert parts["r0"].ending
    parts["r0"].accept()
    with pytest.raises(FencedOut, match="has left generation 1"):
        parts["r0"].applied(stop=8)


def test_a_run_that_goes_back_to_a_checkpoint_uses_its_samples_again() -> None:
    """And the ledger counts how many."""
    machine, parts = ready(1)
    step(machine, parts)
    step(machine, parts)
    machine.handle(ev.Ended("r0"), 1)
    fresh = Participant("fresh")
    exchange(machine, fresh, 1)
    exchange(machine, fresh, 1)
    assert fresh.enter() == "checkpoint"
    fresh.ready(step=1, position=8)
    exchange(machine, fresh, 1)
    assert (machine.ledger.step, machine.ledger.position, machine.ledger.redone) == (1, 8, 8)


def test_replicas_that_see_different_checkpoints_are_refused() -> None:
    """All members of a generation begin with one state."""
    machine = Membership(Rules(2, 2, start_s=0), 0)
    parts = {name: Participant(name) for name in ("a", "b")}
    exchange_all(machine, parts)
    for name, at in (("a", 4), ("b", 8)):
        parts[name].enter()
        parts[name].ready(step=at, position=at * 8)
    exchange(machine, parts["a"])
    refusal = next(answer for answer in exchange(machine, parts["b"]) if isinstance(answer, ev.Refusal))
    assert "loaded the checkpoint of step 8, others that of 4" in refusal.sentence


def test_a_leaver_hands_its_state_over_before_it_goes() -> None:
    """The only replica leaves: the spare that follows copies its state, and then the leaver is let go."""
    machine, parts = ready(1)
    step(machine, parts)
    spare = Participant("spare")
    exchange(machine, spare)
    machine.handle(ev.Leave("r0"), 0)
    exchange_all(machine, {**parts, "spare": spare})
    assert (machine.view().members, machine.view().holders) == (("spare",), ("r0",))
    assert spare.enter() == "peer"
    spare.ready(step=1, position=8)
    step(machine, {"spare": spare})
    assert machine.fenced["r0"].reason == "it left"
    assert (machine.ledger.step, machine.ledger.redone) == (2, 0)


def test_who_has_left_is_not_shown_as_fenced() -> None:
    """Its launcher would kill and replace it. Lost members are shown, and others that were fenced and may still run."""
    machine, parts = ready(1, maximum=2)
    step(machine, parts)
    spare = Participant("spare")
    exchange(machine, spare)
    machine.handle(ev.Expel("spare", "too slow"), 0)
    other = Participant("other")
    machine.handle(ev.Leave("r0"), 0)
    exchange_all(machine, {**parts, "other": other})
    exchange_all(machine, {**parts, "other": other})
    assert other.enter() == "peer"
    other.ready(step=1, position=8)
    step(machine, {"other": other})
    assert machine.fenced["r0"].reason == "it left"
    assert machine.view(["r0", "spare"]).fenced == {"spare": "too slow"}
    machine.handle(ev.Ended("other"), 0)
    assert machine.view().fenced == {"other": "its processes ended"}


def test_the_majority_fences_the_one_whose_parameters_differ() -> None:
    """Three fingerprints, one of them different: that replica goes, and the verdict names it."""
    machine, parts = ready(3)
    outcome = None
    for name, part in parts.items():
        part.applied(stop=8, fingerprint=7 if name == "r1" else 5)
        outcome = machine.handle(part.unsent()[-1], 0)
    assert outcome is not None
    assert outcome.verdict is not None
    assert outcome.verdict.culprits == ("r1",)
    assert "differ from those of the 2 others" in outcome.verdict.sentence
    assert "r1" in machine.fenced


def test_the_rules_refuse_impossible_bounds() -> None:
    """More replicas at least than at most."""
    with pytest.raises(ValueError, match="3 to 2 replicas cannot be"):
        Rules(3, 2)


def test_a_scale_outside_the_bounds_is_refused() -> None:
    """An operator's order is checked against the rules."""
    machine = Membership(Rules(1, 4), 0)
    answer = machine.handle(ev.Scale(5), 0).answer
    assert isinstance(answer, ev.Refusal)
    assert "the run has 1 to 4" in answer.sentence


def test_a_view_says_where_its_members_host_a_store() -> None:
    """The addresses that the members joined with, in the members' order, also by a coordinator that starts anew; none
    for a member that is gone."""
    machine = Membership(Rules(2, 2, start_s=0), 0)
    history: list[ev.Decision] = []
    parts = [Participant(name, address=f"127.0.0.1:{port}") for name, port in (("b", 2), ("a", 1))]
    for part in [*parts, *parts]:
        for event in part.unsent():
            outcome = machine.handle(event, 0)
            history += outcome.decisions
            part.hear(outcome.answer)
        part.hear(machine.handle(ev.Look(), 0).answer)
        part.accept()
        for event in part.unsent():
            history += machine.handle(event, 0).decisions
    view = Membership(Rules(2, 2), 0, history=history).view()
    assert (view.members, view.addresses) == (("b", "a"), ("127.0.0.1:2", "127.0.0.1:1"))
    assert Membership(Rules(2, 2), 0, history=machine.snapshot()).view().addresses == view.addresses
    machine.handle(ev.Ended("b"), 1)
    assert machine.view().addresses == ("", "127.0.0.1:1")
