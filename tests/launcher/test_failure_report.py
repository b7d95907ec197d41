"""The launcher's last words, from invented ends."""

from __future__ import annotations

import signal

from shoal.launcher.failure import Failure, failure_of
from shoal.launcher.root_cause import Exit, failure_report, root_cause


def record(rank: int, message: str, *, secondary: bool = False) -> Failure:
    """A rank's record."""
    return Failure(
        rank=rank, host="tuna", pid=rank, time_ns=rank, exit_code=3, kind="Kind", message=message, secondary=secondary
    )


def test_the_cause_is_whole_and_the_others_take_a_line_each():
    """Both lines of the cause's message, that an echo is one, and a word for those that left well."""
    exits = [Exit(0, 100, 3, 0), Exit(1, 101, 3, 1), Exit(2, 102, 0, 2), Exit(3, 103, 75, 3), Exit(4, 104, 9, 9)]
    ends = root_cause([record(1, "one\ntwo"), record(0, "lost\npeer", secondary=True)], exits)
    assert failure_report(ends, exits, stopped={}, log_tails={}).splitlines() == [
        "rank 1 of 5 failed (host tuna, pid 101, exit code 3):",
        "one",
        "two",
        "rank 0 (pid 100): lost another rank",
        "rank 2 (pid 102): finished",
        "rank 3 (pid 103): stopped after a good checkpoint",
        "rank 4 (pid 104): exit code 9, no message",
    ]


def test_no_rank_repeats_what_the_cause_said():
    """Four ranks refuse the same key, another has a reason of its own: the sentence stands there once."""
    exits = [Exit(rank, 100 + rank, 2, rank) for rank in range(5)]
    records = [record(rank, "run.steps: found 0") for rank in range(4)] + [record(4, "no disk")]
    report = failure_report(root_cause(records, exits), exits, stopped={}, log_tails={})
    assert report.splitlines() == [
        "run.steps: found 0",
        "4 of 5 ranks failed with this, rank 0 first (host tuna, pid 100, exit code 2)",
        "rank 4 (pid 104): Kind: no disk",
    ]


def test_ranks_that_leave_alike_without_a_word_are_counted():
    """As those of a script that says why itself, and exits: no line for each."""
    exits = [Exit(rank, 100 + rank, 2, rank) for rank in range(3)] + [Exit(3, 103, 7, 3)]
    report = failure_report(root_cause([], exits), exits, stopped={}, log_tails={})
    assert [line.split(" first (host")[0] for line in report.splitlines()] == [
        "it left no message",
        "3 of 4 ranks failed with this, rank 0",
        "rank 3 (pid 103): exit code 7, no message",
    ]


def test_ranks_that_ran_out_of_memory_together_say_so_once():
    """Each was left another number of bytes: the first one's numbers stand, the others ran out, too."""
    exits = [Exit(rank, 100 + rank, 5, rank) for rank in range(2)]
    records = [failure_of(MemoryError(f"you tried to allocate {rank + 1} bytes"), rank) for rank in range(2)]
    report = failure_report(root_cause(records, exits), exits, stopped={}, log_tails={})
    assert report.count("asked for") == 1
    assert report.splitlines()[-1] == "rank 1 (pid 101): out of memory, too"


def test_among_echoes_an_explained_one_leads():
    """A rank that only says that a connection broke, however early, stands behind one that names the culprit."""
    raw = Failure(rank=0, host="h", pid=0, time_ns=0, exit_code=3, kind="DistNetworkError", message="x", secondary=True)
    told = Failure(rank=1, host="h", pid=1, time_ns=9, exit_code=3, kind="CollectiveError", message="y", secondary=True)
    assert [end.exit.rank for end in root_cause([raw, told], [Exit(0, 0, 3, 0), Exit(1, 1, 3, 9)])] == [1, 0]


def test_a_stopped_rank_leads_only_where_nobody_failed_by_itself():
    """Beside a cause of its own kind SIGSTOP is a remark; beside echoes it is the explanation."""
    exits = [Exit(0, 100, -9, 1, by_launcher=True), Exit(1, 101, 3, 0)]
    echo = failure_report(root_cause([record(1, "m", secondary=True)], exits), exits, stopped={0: 100}, log_tails={})
    assert echo.startswith("rank 0 (pid 100) is stopped (SIGSTOP)")
    own = failure_report(root_cause([record(1, "m")], exits), exits, stopped={0: 100}, log_tails={})
    assert own.startswith("rank 1 of 2 failed")
    assert "rank 0 (pid 100) is stopped (SIGSTOP)" in own


def test_a_kill_from_outside_says_so_and_shows_the_log():
    """SIGKILL by nobody we know: the hint at the kernel's memory killer, and the log's end."""
    exits = [Exit(0, 100, -9, 0)]
    report = failure_report(root_cause([], exits), exits, stopped={}, log_tails={0: "last words"})
    assert "killed by SIGKILL" in report
    assert "dmesg" in report
    assert report.endswith("last words")


def test_a_rank_that_touched_a_lost_page_says_what_that_means():
    """SIGBUS: no rank can say it itself."""
    exits = [Exit(0, 100, -signal.SIGBUS, 0)]
    report = failure_report(root_cause([], exits), exits, stopped={}, log_tails={})
    assert "killed by SIGBUS" in report
    assert "parameters on disk" in report
