"""Every algorithm for every number of ranks is proved by the checker, and the checker finds what is planted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from shoal.collectives import algorithms
from shoal.collectives.algorithms import tables
from shoal.collectives.table import CollectiveTable, Kind, Move, Receive, Send, Step, Transfer, relabelled, table_of
from shoal.errors import LayoutError
from tests.collectives.played import begun, check

KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
WORLDS = (*range(1, 18), 24, 31, 33, 64)
EAGER_RANKS = 12
BLOCKS = 3


def all_tables(kind: Kind, ranks: int) -> tuple[CollectiveTable, ...]:
    """Every algorithm, a hierarchy wherever the ranks divide."""
    local = next((g for g in range(2, ranks) if ranks % g == 0), 1)
    return tables.__wrapped__(kind, ranks, local=local, blocks=BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_is_its_collective_for_any_number_of_ranks(kind: Kind) -> None:
    """1 to 64 ranks: each contribution once in each result, no rank waits for ever although sends wait."""
    names = set()
    for ranks in WORLDS:
        for table in all_tables(kind, ranks):
            check(table)
            names.add(table.name)
    assert len(names) == {"all_reduce": 9, "reduce_scatter": 4, "all_gather": 4, "all_to_all": 2}.get(kind, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_sends_end_in_the_same_state(kind: Kind) -> None:
    """Whether a send waits for its receiver changes nothing in any cell of any rank."""
    for ranks in range(1, EAGER_RANKS + 1):
        for table in all_tables(kind, ranks):
            eager, waiting = begun(table, synchronous=False), begun(table, synchronous=True)
            eager.run()
            waiting.run()
            for left, right in zip(eager.states, waiting.states, strict=True):
                assert {c: x[:2] for c, x in left.items()} == {c: x[:2] for c, x in right.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_ranks_is_as_right(kind: Kind) -> None:
    """A table keeps its meaning when ranks change places; the root follows."""
    for ranks in (2, 5, 6, 8):
        order = random.Random(ranks).sample(range(ranks), ranks)
        for table in all_tables(kind, ranks):
            placed = relabelled(table, order)
            check(placed)
            assert placed.root == order[0]


def test_an_order_that_leaves_a_rank_out_is_refused() -> None:
    """It has to be a permutation."""
    with pytest.raises(LayoutError, match="each of 3 ranks once"):
        relabelled(algorithms.all_reduce_by_ring(3), [0, 1, 1])


def changed(table: CollectiveTable, rank: int, step: int, new: Callable[[Step], Step]) -> CollectiveTable:
    """The table with one step of one rank replaced."""
    row = list(table.rows[rank])
    row[step] = new(row[step])
    rows = list(table.rows)
    rows[rank] = tuple(row)
    return replace(table, rows=tuple(rows))


def without_send(step: Step) -> Step:
    return step._replace(sends=())


def without_receive(step: Step) -> Step:
    return step._replace(receives=())


def copying(step: Step) -> Step:
    return step._replace(receives=tuple(r._replace(reduce=False) for r in step.receives))


def adding(step: Step) -> Step:
    return step._replace(receives=tuple(r._replace(reduce=True) for r in step.receives))


def another_cell_sent(step: Step) -> Step:
    return step._replace(sends=tuple(Send(s.to, tuple((c + 1) % 4 for c in s.cells)) for s in step.sends))


def another_cell_written(step: Step) -> Step:
    return step._replace(
        receives=tuple(Receive(r.source, tuple((c + 1) % 4 for c in r.cells), r.reduce) for r in step.receives)
    )


def cell_short(step: Step) -> Step:
    return step._replace(receives=tuple(r._replace(cells=r.cells[:-1]) for r in step.receives))


def added_to_itself(step: Step) -> Step:
    return step._replace(moves=(Move(0, 0, True),))


def no_such_cell(step: Step) -> Step:
    return step._replace(moves=(Move(0, 99, False),))


RING, HALVING = algorithms.all_reduce_by_ring(4), algorithms.halving_doubling(4)


@pytest.mark.parametrize(
    ("table", "step", "fault", "complaint"),
    [
        (HALVING, 0, without_send, "wait for ever|keeps to its own|as many cells"),
        (HALVING, 0, without_receive, "wait for ever|keeps to its own|as many cells"),
        (RING, 5, without_send, "wait for ever"),
        (RING, 5, without_receive, "wait for ever"),
        (RING, 0, copying, "ends with chunk .* wants chunk"),
        (RING, 3, adding, "added twice"),
        (RING, 0, another_cell_sent, "keeps to its own"),
        (RING, 0, another_cell_written, "keeps to its own"),
        (HALVING, 0, cell_short, "as many cells at both ends"),
        (RING, 2, added_to_itself, "added twice"),
        (RING, 2, no_such_cell, "there are 4"),
        (algorithms.reduce_scatter_by_ring(4), 0, another_cell_written, "only equal ones"),
        (algorithms.all_gather_by_ring(4), 0, another_cell_sent, "holds nothing yet"),
        (algorithms.all_gather_by_ring(4), 0, another_cell_written, "ends with|holds nothing yet"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(
    table: CollectiveTable, step: int, fault: Callable[[Step], Step], complaint: str
) -> None:
    """Whichever rank has it."""
    check(table)
    for rank in range(4):
        with pytest.raises(LayoutError, match=complaint):
            check(changed(table, rank, step, fault))


def test_a_message_that_nobody_expects_is_found() -> None:
    """With eager sends nobody would wait for it; with synchronous ones its sender does."""
    extra = table_of("odd", "broadcast", ranks=2, chunks=1, steps=[[Transfer(0, 1, 0, 0)]])
    lost = changed(
        table_of("odd", "broadcast", ranks=2, chunks=1, steps=[[Transfer(0, 1, 0, 0)]] * 2), 1, 1, without_receive
    )
    check(extra)
    with pytest.raises(LayoutError, match="wait for ever"):
        check(lost)
    with pytest.raises(LayoutError, match="never expects"):
        begun(lost, synchronous=False).run()


def test_sends_that_wait_for_each_other_are_found() -> None:
    """Two ranks that send in one step and receive in the next only work while sends are buffered."""
    cross = table_of("cross", "all_gather", ranks=2, chunks=2, steps=[[Transfer(0, 1, 0, 0), Transfer(1, 0, 1, 1)]])
    rows = tuple((Step(sends=row[0].sends), Step(receives=row[0].receives)) for row in cross.rows)
    begun(replace(cross, rows=rows), synchronous=False).run()
    with pytest.raises(LayoutError, match="wait for ever"):
        check(replace(cross, rows=rows))


def test_sums_in_different_orders_are_found() -> None:
    """Everyone adding all others to its own vector, one by one, is an all-reduce whose bits differ between ranks."""
    steps = [[Transfer(rank, to, 0, 1 + rank) for rank in range(3) for to in range(3) if to != rank]]
    steps += [[Transfer(rank, rank, 1 + other, 0, True) for other in range(3) if other != rank] for rank in range(3)]
    table = table_of("hasty", "all_reduce", ranks=3, chunks=1, steps=steps, cells=4)
    with pytest.raises(LayoutError, match="in another order than rank 0"):
        check(table)


def test_two_writes_of_one_cell_in_one_step_are_found() -> None:
    """Which of them comes last depends on the wire."""
    steps = [[Transfer(0, 2, 0, 0), Transfer(1, 2, 0, 0)]]
    table = table_of("race", "all_reduce", ranks=3, chunks=1, steps=steps)
    with pytest.raises(LayoutError, match="more than once in step 0"):
        check(table)


@pytest.mark.parametrize("ranks", [2, 3, 7, 8, 13, 32, 64])
def test_a_rank_of_the_double_tree_sends_and_receives_at_most_one_message_a_step(ranks: int) -> None:
    """So both directions of its port are used, and never twice."""
    table = algorithms.all_reduce_by_double_tree(ranks, blocks=4)
    assert max(len(step.sends) for row in table.rows for step in row) == 1
    assert max(len(step.receives) for row in table.rows for step in row) == 1
    assert max(sum(len(s.cells) for s in step.sends) for row in table.rows for step in row) == 1
