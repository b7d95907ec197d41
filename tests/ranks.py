"""A pool of rank processes that lives as long as the test session.

A forkserver that has imported torch once makes the workers, so that a test on several ranks costs milliseconds and not
an import. A worker runs `function(place, *args)` and sends back what it returns or the traceback of what it raised.
A worker that a test has killed, or that timed out, is replaced before the next test.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.forkserver import forkserver
from tests.waiting import HANG_S

POOL_S = HANG_S + 30.0
"""Longer than what a rank waits for, which says what did not come."""


@dataclass(frozen=True)
class TestPlace:
    """What a rank of a test is told: who it is, and a store that only this call uses."""

    __test__ = False
    rank: int
    size: int
    store: dist.Store


@dataclass
class RankPool:
    """Workers, made when they are first needed."""

    workers: list[tuple[Any, Any]] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        self._context = forkserver()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __call__(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = POOL_S) -> list[Any]:
        """What `function(place, *args)` returned on each rank. Raises `AssertionError` with the traceback of one."""
        outcomes = self.outcomes(world, function, *args, timeout_s=timeout_s)
        for rank, (worked, value) in enumerate(outcomes):
            if not worked:
                raise AssertionError(f"rank {rank} of {world}:\n{value}")
        return [value for _, value in outcomes]

    def outcomes(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = POOL_S,
        lost: Collection[int] = (),
    ) -> list[tuple[bool, Any]]:
        """Per rank: (True, value), or (False, what went wrong). For tests that expect ranks to fail.

        Nobody waits for the ranks in `lost`, which the function stops or kills: they are ended when the others have
        answered.
        """
        self._fill(world)
        self.calls += 1
        for rank in range(world):
            self.workers[rank][1].send((function, args, rank, world, self._store.port, f"call-{self.calls}"))
        deadline_s = time.monotonic() + timeout_s
        found = {rank: self._answer(rank, deadline_s) for rank in range(world) if rank not in lost}
        return [found[rank] if rank in found else self._ended(rank, "lost") for rank in range(world)]

    def close(self) -> None:
        """Ends the workers."""
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()

    def _fill(self, world: int) -> None:
        self.workers = [w for w in self.workers if w[0].is_alive()]
        while len(self.workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))

    def _answer(self, rank: int, deadline_s: float) -> tuple[bool, Any]:
        process, pipe = self.workers[rank]
        multiprocessing.connection.wait([pipe, process.sentinel], timeout=max(0.0, deadline_s - time.monotonic()))
        try:
            if pipe.poll():
                return pipe.recv()
        except EOFError:
            process.join()  # only its end closes its pipe
        return self._ended(rank, "timed out") if process.is_alive() else self._ended(rank, "died")

    def _ended(self, rank: int, how: str) -> tuple[bool, str]:
        process, _ = self.workers[rank]
        process.kill()
        process.join()
        return False, f"died with exit code {process.exitcode}" if how == "died" else how


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            function, args, rank, world, port, name = pipe.recv()
        except EOFError:
            return
        store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
        try:
            pipe.send((True, function(TestPlace(rank, world, store), *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
