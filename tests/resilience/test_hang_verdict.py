"""Ten planted hangs, as ranks would report them: each verdict names the right rank and line."""

from __future__ import annotations

import msgspec
import pytest

from shoal.assembly.hang_watch import groups_of, writers
from shoal.resilience.hang_verdict import CodePlace, HangVerdict, LastCall, RankReport, hang_verdict

WORLD = {"world": (0, 1, 2, 3)}
TRAIN = CodePlace("/home/u/train.py", 40, "step")
ELSEWHERE = CodePlace("/home/u/train.py", 77, "on_step")
SUM = "all_reduce (sum) of float32 [1000]"
INSIDE = (TRAIN, CodePlace("/lib/shoal/comm/seam_work.py", 200, "wait"))


def waiting(rank: int, number: int = 9, signature: str = SUM, place: CodePlace = TRAIN, **more: int) -> RankReport:
    return RankReport(rank, f"host{rank // 2}", {"world": LastCall(number, signature, place, **more)}, INSIDE)


def busy(rank: int, *stack: CodePlace, number: int = 8) -> RankReport:
    """Its last call is over, and it is somewhere else."""
    return RankReport(rank, f"host{rank // 2}", {"world": LastCall(number, SUM, TRAIN, ended=True)}, stack)


def all_but(*special: RankReport) -> dict[int, RankReport]:
    return {rank: waiting(rank) for rank in range(4)} | {report.rank: report for report in special}


PLANTED: dict[str, tuple[dict[int, RankReport], tuple[int, ...], CodePlace | None, str]] = {
    "skips a collective": (
        all_but(waiting(2, 9, "all_gather of float32 [8]", ELSEWHERE)),
        (2,),
        ELSEWHERE,
        "as all_gather of float32 [8] at /home/u/train.py:77 (on_step), the others as all_reduce",
    ),
    "sleeps": (
        all_but(busy(1, ELSEWHERE, CodePlace("<built-in>", 0, "sleep"))),
        (1,),
        CodePlace("<built-in>", 0, "sleep"),
        "sleeps",
    ),
    "dead-locks on a lock": (
        all_but(busy(3, ELSEWHERE, CodePlace("/usr/lib/python3/threading.py", 300, "acquire"))),
        (3,),
        ELSEWHERE,
        "waits for a lock at /home/u/train.py:77",
    ),
    "other shapes": (
        all_but(waiting(0, 9, "all_reduce (sum) of float32 [999]")),
        (0,),
        TRAIN,
        "rank 0 made call 9 of group 'world' as all_reduce (sum) of float32 [999]",
    ),
    "data starves": (
        all_but(
            busy(2, TRAIN, CodePlace("/lib/shoal/data/feed.py", 90, "next"), CodePlace("/lib/threading.py", 20, "wait"))
        ),
        (2,),
        TRAIN,
        "waits for data at /home/u/train.py:40",
    ),
    "the backend's thread is stuck": (
        {rank: waiting(rank, pending=2 if rank == 1 else 1) for rank in range(4)},
        (1,),
        TRAIN,
        "the backend's thread of rank 1 has not taken call 8 of group 'world'",
    ),
    "the disk hangs": (
        all_but(busy(0, ELSEWHERE, CodePlace("/lib/shoal/checkpoint/objects.py", 180, "fsync"))),
        (0,),
        ELSEWHERE,
        "waits for the disk at /home/u/train.py:77",
    ),
    "partition": (
        {0: waiting(0), 1: waiting(1)},
        (2, 3),
        None,
        "ranks 2, 3 did not report: killed, stopped, or cut off",
    ),
    "stopped": ({rank: waiting(rank) for rank in (0, 1, 2)}, (3,), None, "rank 3 did not report"),
    "killed": ({rank: waiting(rank) for rank in (1, 2, 3)}, (0,), None, "for it wait ranks 1 to 3 in call 9"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_hangs_are_named(kind: str) -> None:
    """The rank, the line, and what it does there."""
    reports, ranks, place, words = PLANTED[kind]
    found = hang_verdict(WORLD, reports)
    assert (found.ranks, found.place) == (ranks, place)
    assert words in found.sentence


def test_the_chain_of_waits_is_followed_over_groups() -> None:
    """Rank 0 waits for 1 in one group, 1 for 2 in another; 2 is in neither, and to blame."""
    groups = {"pipeline": (0, 1), "data": (1, 2)}
    call = LastCall(4, SUM, TRAIN)
    reports = {
        0: RankReport(0, "a", {"pipeline": LastCall(6, SUM, TRAIN)}, INSIDE),
        1: RankReport(1, "a", {"pipeline": LastCall(5, SUM, TRAIN, ended=True), "data": call}, INSIDE),
        2: RankReport(2, "b", {"data": LastCall(3, SUM, TRAIN, ended=True)}, (ELSEWHERE,)),
    }
    found = hang_verdict(groups, reports)
    assert (found.ranks, found.place) == ((2,), ELSEWHERE)
    assert "for it wait rank 1 in call 4" in found.sentence


def test_in_two_by_two_ranks_the_one_outside_of_the_watchers_groups_is_found() -> None:
    """Rank 0 waits for 1, 1 for 3 in a group that 0 is not in, and 3 sleeps: every watch blames 3, from the groups of
    all reports. Rank 2 is in no collective, so that 0 writes the verdict."""

    def over(number: int) -> LastCall:
        return LastCall(number, SUM, TRAIN, ended=True)

    call = LastCall(5, SUM, TRAIN)
    rows, columns = {"0-1": (0, 1), "2-3": (2, 3)}, {"0-2": (0, 2), "1-3": (1, 3)}
    calls = {
        0: {"0-1": call, "0-2": over(4)},
        1: {"0-1": over(4), "1-3": call},
        2: {"2-3": over(4), "0-2": over(4)},
        3: {"2-3": over(4), "1-3": over(4)},
    }
    reports = {
        rank: RankReport(
            rank,
            "a",
            found,
            (ELSEWHERE,) if rank in (2, 3) else INSIDE,
            {name: members for name, members in (rows | columns).items() if rank in members},
        )
        for rank, found in calls.items()
    }
    found = hang_verdict(groups_of(reports), reports)
    assert (found.ranks, found.place) == ((3,), ELSEWHERE)
    assert min(writers(reports, found)) == 0
    assert min(writers({rank: reports[rank] for rank in (1, 2, 3)}, found)) == 1


def test_groups_in_different_orders_are_a_circle() -> None:
    """Rank 0 is in group a and waits for 1, which is in group b and waits for 0."""
    groups = {"a": (0, 1), "b": (0, 1)}
    reports = {
        0: RankReport(0, "h", {"a": LastCall(3, SUM, TRAIN)}, INSIDE),
        1: RankReport(1, "h", {"b": LastCall(3, SUM, ELSEWHERE)}, INSIDE),
    }
    found = hang_verdict(groups, reports)
    assert found.ranks == (0, 1)
    assert "rank 0 waits for rank 1 in call 3 of group 'a'" in found.sentence
    assert "use the groups in the same order" in found.sentence


def test_of_a_circle_the_rank_that_left_a_call_out_is_named() -> None:
    """Two of three wait in call 3 of group a; rank 1 did not make it, and waits for them in group b."""
    groups = {"a": (0, 1, 2), "b": (0, 1, 2)}
    reports = {
        rank: RankReport(rank, "h", {"a": LastCall(3, SUM, TRAIN), "b": LastCall(7, SUM, TRAIN, ended=True)}, INSIDE)
        for rank in (0, 2)
    }
    over = LastCall(2, SUM, TRAIN, ended=True)
    reports[1] = RankReport(1, "h", {"a": over, "b": LastCall(8, SUM, ELSEWHERE)}, INSIDE)
    found = hang_verdict(groups, reports)
    assert (found.ranks, found.place) == ((1,), ELSEWHERE)
    assert "rank 1 left out call 3 of group 'a'" in found.sentence
    assert "ranks 0, 2 in call 3" in found.sentence


def test_where_nobody_is_missing_the_network_is_named() -> None:
    """All are in the same call."""
    found: HangVerdict = hang_verdict(WORLD, all_but())
    assert "the network between them carries nothing" in found.sentence


def test_gpus_that_are_waited_for_may_compute() -> None:
    """A step of a large batch takes longer on them than a collective ever should: the network is not blamed alone."""
    at_device = (TRAIN, CodePlace("/lib/shoal/state.py", 37, "wait_for"))
    reports = {rank: msgspec.structs.replace(waiting(rank), stack=at_device) for rank in range(4)}
    assert "nobody is missing: their GPUs compute for so long, or" in hang_verdict(WORLD, reports).sentence


def test_without_reports_nothing_is_claimed() -> None:
    """No guess."""
    with pytest.raises(ValueError, match="no rank has reported"):
        hang_verdict(WORLD, {})


def test_thousands_of_ranks_are_named_by_their_ranges() -> None:
    """The sentence stays one that can be read."""
    size, stuck = 4096, {*range(0, 64, 4)}
    reports = {rank: waiting(rank) for rank in range(size) if rank not in stuck}
    found = hang_verdict({"world": range(size)}, reports)
    assert found.ranks == tuple(sorted(stuck))
    assert found.sentence.startswith("ranks 0, 4, 8, 12, 16, 20, and 10 more did not report")
    assert len(found.sentence) < 400
