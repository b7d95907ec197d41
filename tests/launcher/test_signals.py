"""A stop request, with real signals to this very process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launcher.signals import SAME_REQUEST_S, Debounce, StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_only_sets_the_flag(number):
    """The process goes on, knows which signal it was, and has its old handlers afterwards."""
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_a_second_request_ends_at_once_and_an_echo_does_not():
    """Within 0.3 s it is the same request; later it ends the process with 128 + n."""
    times, ended = iter([1.0, 1.2, 2.0]), []
    with StopRequest(clock=lambda: next(times), end=ended.append):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == []
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]


def test_other_threads_cannot_listen():
    """Python runs handlers in the main thread only: elsewhere it is refused, not silently deaf."""
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            StopRequest().__enter__()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20))
def test_a_request_comes_long_enough_after_the_last_one(gaps):
    """More than 0.3 s after the last request, whatever came between: no stream is so fast that it is one request."""
    debounce, now_s, requests_s = Debounce(), 0.0, [0.0]
    assert debounce.request(now_s)
    for gap_s in gaps:
        now_s += gap_s
        if debounce.request(now_s):
            assert now_s - requests_s[-1] > SAME_REQUEST_S
            requests_s.append(now_s)
        assert now_s - requests_s[-1] <= SAME_REQUEST_S


def test_keys_pressed_fast_are_a_second_request():
    """Ctrl-C every 0.2 s: the third one."""
    debounce = Debounce()
    assert [debounce.request(0.2 * press) for press in range(5)] == [True, False, True, False, True]


LEAVING = """
import os, signal, sys
from shoal.launcher.signals import StopRequest, end_at_once, end_with
try:
    with end_at_once(), StopRequest():
        end_with(7)
finally:
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_code_that_is_settled_stays(number):
    """The contexts that the process leaves on its way out put back no handler that would give another code."""
    done = subprocess.run([sys.executable, "-c", LEAVING, str(int(number))], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (7, b"")
