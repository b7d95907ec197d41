"""The launcher's policy, played with invented times."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

from hypothesis import given
from hypothesis import strategies as st

from shoal.launcher.supervision import Patience, Supervision

PATIENCE = Patience(failure_s=2.0, saving_s=100.0, terminate_s=1.0)


def supervision(ranks: int = 3) -> Supervision:
    """A run of a few ranks."""
    return Supervision(set(range(ranks)), PATIENCE)


def test_after_a_failure_the_others_get_a_word_then_term_then_kill():
    """Two seconds of grace, SIGTERM, a second, SIGKILL; and only to ranks that still run."""
    run = supervision()
    run.on_exit(1, 1, now_s=10.0)
    assert run.on_time(11.9) == []
    assert run.on_time(12.0) == [(0, SIGTERM), (2, SIGTERM)]
    assert run.on_time(12.5) == []
    run.on_exit(0, 1, now_s=12.6)
    assert run.on_time(13.0) == [(2, SIGKILL)]


def test_a_good_leave_is_patient_and_a_failure_shortens_it():
    """75 gives the long patience; a failure meanwhile gives the short one; 0 starts no clock at all."""
    run = supervision(4)
    run.on_exit(0, 0, now_s=0.0)
    assert run.deadline_s is None
    run.on_exit(1, 75, now_s=1.0)
    assert run.deadline_s == 101.0
    run.on_exit(2, 3, now_s=5.0)
    assert run.deadline_s == 7.0


@given(st.lists(st.tuples(st.sampled_from([1, 3, 75, -9]), st.floats(0, 1)), min_size=1, max_size=8))
def test_no_later_end_lengthens_the_wait(ends):
    """Once a deadline runs, further ends only bring it nearer: a hung rank is always ended."""
    run, now_s, before_s = supervision(9), 0.0, float("inf")
    for rank, (code, later_s) in enumerate(ends):
        now_s += later_s
        run.on_exit(rank, code, now_s=now_s)
        assert run.deadline_s is not None
        assert run.deadline_s <= before_s
        before_s = run.deadline_s


def test_asking_once_is_patient_and_twice_is_not():
    """The first request becomes SIGTERM with no deadline, a second one SIGKILL, also where both are heard at once."""
    run = supervision(2)
    assert run.on_signal(SIGINT) == [(0, SIGTERM), (1, SIGTERM)]
    assert run.deadline_s is None
    assert run.on_signal(SIGTERM) == [(0, SIGKILL), (1, SIGKILL)]


def test_only_signals_that_were_sent_are_ours():
    """A SIGTERM of ours makes -15 and 143 ours, not a SIGKILL by somebody else, and not another rank's end."""
    run = supervision(2)
    run.on_exit(1, -15, now_s=0.0)
    run.on_signal(SIGTERM)
    assert run.sent_by_launcher(0, -15)
    assert run.sent_by_launcher(0, 143)
    assert not run.sent_by_launcher(0, -9)
    assert not run.sent_by_launcher(1, -15)
