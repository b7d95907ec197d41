"""What a rank remembers of its collectives, and what ranks make of it when a call fails."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from shoal.comm.board import Board
from shoal.comm.diagnosis import KEPT, Call, CallLog, Diagnosis
from shoal.errors import CollectiveError
from tests.comm.groups import replicas
from tests.waiting import HANG_S

MEMBERS = ("rank 0 (host h, pid 1)", "rank 1 (host h, pid 2)", "rank 2 (host h, pid 3)")
ONE = Call("all_reduce", [(torch.float32, (3,))], dist.ReduceOp.SUM, None, False, "a.py", 1)


def logged(*numels: int) -> CallLog:
    """A log of all-reduces of these lengths."""
    log = CallLog()
    for numel in numels:
        log.add("all_reduce", [torch.ones(numel)], dist.ReduceOp.SUM, None, False)
    return log


def test_a_call_says_all_that_must_be_alike_and_where_it_was_made() -> None:
    """Operation, reduction, dtype, shape, root; the first dim of uneven rows is left out; the line is the caller's."""
    log = CallLog()
    log.add("broadcast", [torch.ones(2, 3, dtype=torch.int64)], None, 1, False)
    assert log.last().signature == "broadcast of int64 [2, 3], root 1"
    log.add("reduce_scatter", [torch.ones(4), torch.ones(1)], dist.ReduceOp.MAX, None, False)
    assert log.last().signature == "reduce_scatter (max) of float32 [4], float32 [1]"
    log.add("all_to_all", [torch.ones(4, 2)], None, None, True)
    assert log.last().signature == "all_to_all of float32 [*, 2]"
    log.add("barrier", [], None, None, False)
    line = test_a_call_says_all_that_must_be_alike_and_where_it_was_made.__code__.co_firstlineno + 9
    assert str(log.last()) == f"barrier at {__file__}:{line}"


@pytest.mark.parametrize(
    "other",
    [
        ONE._replace(tensors=[(torch.float32, (4,))]),
        ONE._replace(tensors=[(torch.float64, (3,))]),
        ONE._replace(tensors=[]),
        ONE._replace(reduce_op=dist.ReduceOp.MAX),
        ONE._replace(root=0),
        ONE._replace(uneven=True),
        ONE._replace(operation="reduce"),
    ],
)
def test_calls_that_differ_have_different_digests(other: Call) -> None:
    """In anything but the place in the code."""
    assert ONE.digest == ONE._replace(file="b.py", line=2).digest
    assert ONE.digest != other.digest


def test_the_log_keeps_the_last_calls_by_number() -> None:
    """Its size has a bound; numbers go on."""
    log = logged(*range(1, KEPT + 11))
    assert log.count == KEPT + 10
    assert list(log.calls()) == list(range(11, KEPT + 11))
    assert log.calls()[11].tensors == [(torch.float32, torch.Size([11]))]


def diagnosed(*logs: CallLog | None) -> str:
    """What rank 0 says of a failure of which those with a log have published theirs."""
    board = Board(dist.HashStore(), timeout_s=HANG_S)
    for rank in (1, 2, 0):
        if (log := logs[rank]) is not None:
            diagnosis = Diagnosis(board, rank, MEMBERS, "g", log, patience_s=0.2)
            sentence = diagnosis.sentence(
                "all_reduce number 1 of group 'g'", 3.0, "the backend's reason\nits traceback"
            )
    return sentence


def test_a_failure_names_the_first_call_that_differs() -> None:
    """Who called what, and where, although the ranks are not equally far and one says nothing."""
    sentence = diagnosed(logged(3, 5, 7), logged(3, 4), None)
    assert sentence.startswith(f"{MEMBERS[0]}: all_reduce number 1 of group 'g' failed after 3.0 s: call number 2 of")
    assert f"{MEMBERS[0]} called all_reduce (sum) of float32 [5] at {__file__}:" in sentence
    assert f"{MEMBERS[1]} called all_reduce (sum) of float32 [4] at {__file__}:" in sentence
    assert f"{MEMBERS[2]} called a collective that it did not report" in sentence


def test_a_failure_names_who_said_nothing_else_who_made_fewer_calls() -> None:
    """With its last call; where all have called the same, the backend's reason is what there is."""
    assert f"{MEMBERS[2]} did not come" in diagnosed(logged(3), logged(3), None)
    behind = diagnosed(logged(3, 4), logged(3, 4), logged(3))
    assert f"{MEMBERS[2]} made fewer calls, the last was all_reduce (sum) of float32 [3] at {__file__}:" in behind
    assert diagnosed(logged(3), logged(3), logged(3)).endswith("failed after 3.0 s: the backend's reason")


def different(place) -> str:
    """Ranks that call different things, with no check, and wait for what the others say of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.comm.mesh.Diagnosis", partial(Diagnosis, patience_s=HANG_S))
        world = replicas(place, timeout_s=HANG_S).world
    world.all_reduce(torch.ones(3)).wait()
    try:
        world.all_reduce(torch.ones(3 + place.rank)).wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_ranks_that_differ_are_named_without_the_check(ranks) -> None:
    """In shared memory, where the core refuses such calls: both calls, both lines of code."""
    for sentence in ranks(2, different):
        assert "call number 2 of group 'world' differs between ranks" in sentence
        assert "float32 [3] at" in sentence
        assert "float32 [4] at" in sentence
        assert "test_call_log.py:" in sentence
