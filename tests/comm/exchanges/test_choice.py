"""A codec that follows the link. Time is a number that the test's own group and codecs advance."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from shoal.codec.codec import Payload
from shoal.codec.config import BlockwiseConfig, TopKConfig
from shoal.codec.quantise import Blockwise
from shoal.codec.top_k import TopK
from shoal.comm.collective import Collective, Handle, Reduction
from shoal.comm.exchanges import choice as choice_module
from shoal.comm.exchanges.choice import ASIDE, REMEMBERED, Alarm, Choice
from shoal.comm.exchanges.coded import CodedExchanges
from shoal.comm.exchanges.exchange import Exchange, Segment
from tests.comm.exchanges.test_coded import on_ranks

NUMEL, EVERY, RANKS = 4000, 3, 2
FAST, SLOW = 1e10, 1e5
"""Bytes a second: 4000 numbers take a microsecond, or 160 ms; coding takes a millisecond."""
CODING_S = 1e-3
FLOAT32 = 1e-3
"""Sums of 40 float32 numbers, at most 10."""


WHOLE = Segment("a", 0, (NUMEL,))


class World:
    """The time of one rank, and its link."""

    def __init__(self) -> None:
        self.now_s, self.bytes_s = 1.0, FAST

    def clock(self) -> float:
        return self.now_s


class Arriving:
    """A collective that is there when the link has carried its bytes: whoever waits for it waits so long."""

    def __init__(self, inner: Handle, world: World, size_bytes: int) -> None:
        self._inner, self._world, self._end_s = inner, world, world.now_s + size_bytes / world.bytes_s

    def wait(self) -> None:
        self._inner.wait()
        self._world.now_s = max(self._world.now_s, self._end_s)


class Paced:
    """A group that takes the time of the link."""

    def __init__(self, group: Collective, world: World) -> None:
        self._group, self._world, self.rank, self.size = group, world, group.rank, group.size

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Handle:
        return Arriving(self._group.all_reduce(tensor, op), self._world, tensor.nbytes)

    def all_gather(self, output: Tensor, input: Tensor) -> Handle:
        return Arriving(self._group.all_gather(output, input), self._world, input.nbytes)

    def barrier(self) -> Handle:
        return self._group.barrier()


class Timed(Blockwise):
    """A codec that takes time, on the last rank twice as much."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(BlockwiseConfig(block=64))
        self._world, self._coding_s = world, CODING_S * (1 + rank)

    def _encode(self, x: Tensor, key: int) -> Payload:
        self._world.now_s += self._coding_s
        return super()._encode(x, key)


def steps(exchange: Exchange, choices: list[str], choice: Choice, rank: int, *, first: int, stop: int) -> Tensor:
    """The sum of the results; appends what each step used."""
    total = torch.zeros(NUMEL)
    for step in range(first, stop):
        exchange.start()
        choices.append(choice.name)
        exchange.result.copy_(term(rank, step))
        exchange.send(exchange.result)
        exchange.settle()
        exchange.wait()
        exchange.commit()
        total += exchange.result
    return total


def term(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + step))


def over_a_changing_link(group: Collective) -> tuple[list[str], Tensor, Tensor | None, list[str]]:
    """Ten steps on a fast link, ten on a slow one, ten on the fast one again."""
    world, made = World(), []

    def new_choice(group: Collective) -> Choice:
        made.append(Choice({"int8": Timed(world, group.rank)}, group, every=EVERY, clock=world.clock))
        return made[0]

    new = CodedExchanges(new_choice, feedback=True, seed=0)
    exchange = new(Paced(group, world), torch.zeros(NUMEL), [WHOLE])  # type: ignore[arg-type]
    used, lines, total = [], [], torch.zeros(NUMEL)
    for number, bytes_s in enumerate((FAST, SLOW, FAST)):
        world.bytes_s = bytes_s
        total += steps(exchange, used, made[0], group.rank, first=10 * number, stop=10 * number + 10)
        lines += new.take_lines()
    return used, total, new.made[0].residual, lines


def test_the_codec_follows_the_link() -> None:
    """None on the fast link, a codec on the slow one at the second look, and none again; all ranks alike."""
    for used, _, _, lines in on_ranks(RANKS, over_a_changing_link):
        assert used[:10] == ["none"] * 10
        assert used[10 + 2 * EVERY : 20] == ["int8"] * (10 - 2 * EVERY)
        assert used[20 + 2 * EVERY :] == ["none"] * (10 - 2 * EVERY)
        assert [line.split()[1] for line in lines] == ["none", "int8", "none"]


PHASE_STEPS, COMPUTING_S, LOST = 100, 0.02, 1.1
LARGE, WAN, PROBE = 50_000, 1.25e6, 52 << 10
"""Numbers, bytes a second and bytes of a look: numbers take 160 ms as they are, a quarter of it coded, a look 42 ms."""
SEGMENT = Segment("a", 0, (LARGE,))


def over_long_phases(group: Collective, *, fixed: str | None) -> list[float]:
    """Seconds of three phases: a fast, a slow, a fast link. `fixed`: what every step uses; None: what is chosen."""
    world = World()
    paced: Collective = Paced(group, world)  # type: ignore[assignment]
    candidates = {"int8": Timed(world, group.rank)}
    choice = Choice(candidates, paced, every=None if fixed else 10, clock=world.clock)
    choice.name = fixed or choice.name
    exchange = CodedExchanges(lambda group: choice, feedback=True, seed=0)(paced, torch.zeros(LARGE), [SEGMENT])
    taken_s = []
    for bytes_s in (FAST, WAN, FAST):
        world.bytes_s, begin_s = bytes_s, world.now_s
        for _ in range(PHASE_STEPS):
            exchange.start()
            world.now_s += COMPUTING_S
            exchange.send(exchange.result)
            exchange.settle()
            exchange.wait()
            exchange.commit()
        taken_s.append(world.now_s - begin_s)
    return taken_s


def test_what_is_lost_to_the_best_of_each_phase_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth in each of three phases at most; the choice takes less time in all than any way that stays."""
    monkeypatch.setattr(choice_module, "PROBE_BYTES", PROBE)
    none, int8, chosen = (
        torch.tensor(on_ranks(RANKS, partial(over_long_phases, fixed=fixed))).max(dim=0).values
        for fixed in ("none", "int8", None)
    )
    assert none[0] < int8[0]
    assert int8[1] < none[1]
    assert (chosen <= LOST * torch.minimum(none, int8)).all(), (none, int8, chosen)
    assert chosen.sum() < min(none.sum(), int8.sum())


@pytest.mark.parametrize(("repeats", "every"), [(False, 1), (True, 1), (True, None)])
def test_a_run_repeats_what_another_has_chosen(repeats: bool, every: int | None) -> None:
    """Whatever its own link does, and without a look at it, on one host as on several. Every step says what it uses,
    and a line for each change that it is as recorded.
    """
    recorded = ["int8", "none", "none", "int8"]

    def work(group: Collective) -> tuple[list[str], list[str], list[str]]:
        asked: list[str] = []

        def decided(name: str) -> str:
            asked.append(name)
            return recorded[len(asked) - 1] if repeats else name

        world = World()
        paced: Collective = Paced(group, world)  # type: ignore[assignment]
        int8 = Timed(world, group.rank)
        choice = Choice({"int8": int8}, paced, every=every, clock=world.clock, decided=decided, repeats=repeats)
        new = CodedExchanges(lambda group: choice, feedback=True, seed=0)
        exchange = new(paced, torch.zeros(NUMEL), [WHOLE])
        used, lines = [], new.take_lines()
        for step in range(len(recorded)):
            exchange.start()
            used.append(choice.name)
            exchange.result.copy_(term(group.rank, step))
            exchange.send(exchange.result)
            exchange.wait()
            exchange.commit()
            lines += new.take_lines()
        return asked, used, lines

    for asked, used, lines in on_ranks(RANKS, work):
        assert used == (recorded if repeats else ["none"] * len(recorded))
        assert asked == (["none", "int8", "none", "none"] if repeats else used)
        if repeats:
            assert lines == [f"codec: {name}: as recorded" for name in ("int8", "none", "int8")]


def test_an_alarm_rings_for_a_wait_that_has_changed_and_less_often_in_vain() -> None:
    """By a tenth of a step, then by a fifth more than what called in vain; the first steps say what is usual."""
    alarm = Alarm()
    assert not any(alarm.rings(waited_s, 1.0) for waited_s in (0.1, 0.1, 5.0, 0.1, 0.19, 0.01))
    assert not alarm.rings(0.21, 2.0)
    assert alarm.rings(0.21, 1.0)
    alarm.looked(changed=False, rang=True)
    assert not any(alarm.rings(waited_s, 1.0) for waited_s in (0.1, 0.21, 0.40))
    assert alarm.rings(0.42, 1.0)
    alarm.looked(changed=False, rang=True)
    assert not any(alarm.rings(waited_s, 1.0) for waited_s in (0.1, 0.42, 0.61))
    assert alarm.rings(0.63, 1.0)
    alarm.looked(changed=True, rang=True)
    assert not any(alarm.rings(waited_s, 1.0) for waited_s in (0.1, 0.1, 0.1))
    assert alarm.rings(0.21, 1.0)


def test_a_wait_that_called_in_vain_is_usual_for_a_while() -> None:
    """A single long wait does not hide a slower link for ever."""
    alarm = Alarm()
    assert [alarm.rings(waited_s, 1.0) for waited_s in (0.1, 0.1, 0.1, 5.0)] == [False, False, False, True]
    alarm.looked(changed=False, rang=True)
    assert not any(alarm.rings(waited_s, 1.0) for waited_s in [0.1] * (REMEMBERED - 1) + [3.0])
    assert alarm.rings(3.0, 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_many_lengths_call_for_few_looks(seed: int) -> None:
    """A link that stays, and 20 to 200 ms of computing that hide it: less than a look in 80 steps. A link that becomes
    three times as slow calls for one at once.
    """
    alarm, lengths, calls = Alarm(), random.Random(seed), 0

    def rings(wire_s: float) -> bool:
        computing_s = lengths.uniform(0.02, 0.2)
        waited_s = max(0.005, wire_s - computing_s)
        return alarm.rings(waited_s, computing_s + waited_s)

    for _ in range(1000):
        if rings(0.16):
            calls += 1
            alarm.looked(changed=False, rang=True)
    assert calls <= 12
    assert rings(0.48)


@pytest.mark.parametrize("changes", [False, True])
def test_earlier_looks_count_unless_an_alarm_was_right(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """The look that an alarm calls for counts alone; where it has changed nothing, those before it stay."""
    counted = []

    def work(group: Collective) -> list[int]:
        choice = Choice({}, group, every=EVERY)

        def look(every: int) -> None:
            counted.append(len(choice._looks))
            choice._looks.append((1.0, 1.0, 1.0))
            choice.name = "int8" if changes and len(counted) == 4 else choice.name

        monkeypatch.setattr(choice, "_look", look)
        for rang in (False, False, False, True, False):
            choice._look_now(EVERY, rang=rang)
        return counted

    assert on_ranks(1, work) == [[0, 1, 2, 0, 1 if changes else 3]]


def test_what_the_codec_has_not_sent_leaves_when_it_is_left() -> None:
    """The sum of all results is that of all terms: no residual is lost on the way from one codec to none."""
    ranks = on_ranks(RANKS, over_a_changing_link)
    wanted = sum((term(rank, step) for rank in range(RANKS) for step in range(30)), torch.zeros(NUMEL))
    for _, total, residual, _ in ranks:
        assert residual is None
        assert torch.allclose(total, wanted, rtol=0, atol=FLOAT32)


def test_ranks_of_one_host_do_not_measure() -> None:
    """Nothing but the sums themselves is sent, and the line says why."""

    def work(group: Collective) -> tuple[str, list[str], Tensor]:
        choice = Choice({"int8": Timed(World(), group.rank)}, group, every=None)
        new = CodedExchanges(lambda group: choice, feedback=True, seed=0)
        exchange = new(group, torch.zeros(NUMEL), [WHOLE])
        total = steps(exchange, [], choice, group.rank, first=0, stop=1)
        return choice.name, new.take_lines(), total

    for name, lines, total in on_ranks(RANKS, work):
        assert name == "none"
        assert lines == ["codec: none: all ranks share a host, where a sum is faster than any codec"]
        assert torch.equal(total, term(0, 0) + term(1, 0))


@pytest.mark.parametrize("every", [1, EVERY])
def test_a_link_that_stays_keeps_its_codec(every: int) -> None:
    """One line in thirty steps."""

    def work(group: Collective) -> list[str]:
        world = World()
        world.bytes_s = SLOW
        paced: Collective = Paced(group, world)  # type: ignore[assignment]
        choice = Choice({"int8": Timed(world, group.rank)}, paced, every=every, clock=world.clock)
        new = CodedExchanges(lambda group: choice, feedback=True, seed=0)
        exchange = new(paced, torch.zeros(NUMEL), [WHOLE])
        lines = []
        for step in range(30):
            steps(exchange, [], choice, group.rank, first=step, stop=step + 1)
            lines += new.take_lines()
        return lines

    for lines in on_ranks(RANKS, work):
        assert len(lines) == 1
        assert lines[0].startswith("codec: int8 costs")


def test_a_codec_that_falls_behind_is_set_aside() -> None:
    """What top-k keeps back settles while a few numbers hold most of the gradient, and grows when they do so no more:
    another codec takes over on all ranks, the line says why, and after some looks top-k comes back."""

    def work(group: Collective) -> tuple[list[str], list[str]]:
        world = World()
        world.bytes_s = SLOW
        paced: Collective = Paced(group, world)  # type: ignore[assignment]
        candidates = {"top_k": TopK(TopKConfig(fraction=0.05)), "int8": Timed(world, group.rank)}
        choice = Choice(candidates, paced, every=1, most_growth=4.0, clock=world.clock)
        new = CodedExchanges(lambda group: choice, feedback=True, seed=0)
        exchange = new(paced, torch.zeros(NUMEL), [WHOLE])
        used, lines = [], []
        steep = torch.where(torch.arange(NUMEL) % 40 == 0, 1.0, 1e-3)
        for step in range(230):
            exchange.start()
            used.append(choice.name)
            exchange.result.copy_(term(group.rank, step) * (steep if step < 90 else 1.0))
            exchange.send(exchange.result)
            exchange.settle()
            exchange.wait()
            exchange.commit()
            lines += new.take_lines()
        return used, lines

    for used, lines in on_ranks(RANKS, work):
        assert used[:90] == ["top_k"] * 90
        left = used.index("int8")
        assert used[left : left + ASIDE] == ["int8"] * ASIDE
        assert "top_k" in used[left + ASIDE :]
        assert "top_k is set aside" in lines[1]
