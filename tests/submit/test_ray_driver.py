"""The driver of a job on Ray, with hosts that are played: who is told to end, and how the start is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.submit import ray_driver
from shoal.submit.ray_job import RayJob

JOB = RayJob("own", 3, 1, {"CPU": 1.0}, "PACK", ("true",), "", {}, (), 0, 1.0, 1.0, "auto")
NEVER = None


class Lost(Exception):
    """An actor has died."""


class PlayedRay:
    """As much of Ray as the driver calls. A host's `run` ends at once with its code, or never; `stopped` lists the
    hosts that were told to end."""

    def __init__(self, *codes: int | None) -> None:
        self.exceptions = SimpleNamespace(RayActorError=Lost)
        self.stopped: list[int] = []
        self._codes = codes

    def hosts(self) -> list[Any]:
        return [self._host(index) for index in range(len(self._codes))]

    def _host(self, index: int) -> Any:
        def method(call: Callable[..., Any]) -> Any:
            return SimpleNamespace(remote=call)

        return SimpleNamespace(
            meeting_point=method(lambda: ("meet", index)),
            run=method(lambda *_: ("run", index)),
            stop=method(lambda _: self.stopped.append(index) or ("stop", index)),
        )

    def get(self, asked: tuple[str, int]) -> Any:
        what, index = asked
        return ("127.0.0.1", 1) if what == "meet" else self._codes[index]

    def wait(self, asked: list[tuple[str, int]], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [one for one in asked if one[0] == "stop" or self._codes[one[1]] is not NEVER][:num_returns]
        return ready, [one for one in asked if one not in ready]


@pytest.mark.parametrize(
    ("codes", "code", "sentence", "stopped"),
    [
        ((0, 0, 0), 0, "is done", []),
        ((0, 3, 1), 1, "its hosts ended with exit codes 0, 3, 1", []),
        ((NEVER, 137, NEVER), 137, "host 1 of 3 ended with exit code 137; hosts 0, 2 went on, and were told to end",
         [0, 2]),
        ((3, NEVER, 2), 2, "host 0 of 3 ended with exit code 3; host 1 went on, and was told to end", [1]),
        ((75, 75, NEVER), 75, "host 0 of 3 ended with exit code 75; host 2 went on, and was told to end", [2]),
    ],
)  # fmt: skip
def test_hosts_that_go_on_without_one_that_failed_are_told_to_end(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int | None, ...], code: int, sentence: str, stopped: list[int]
) -> None:
    """The exit code is that of the host that failed by itself; hosts that have ended are left alone."""
    monkeypatch.setattr(ray_driver, "_REPORT_S", 0.05)
    ray = PlayedRay(*codes)
    job = msgspec.structs.replace(JOB, save_s=0.05)
    assert ray_driver._until_over(ray, job, ray.hosts()) == (code, sentence)
    assert ray.stopped == stopped
