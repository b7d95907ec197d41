"""The steps of a script under a profiler: `shoal profile mine.py`, whichever loop the script has.

A loop of any kind takes each step's samples from the feed, so a step is what happens from one `next` to the following
one. After the last recorded step the ranks end: nothing of the script that follows is run, and nothing is saved.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from shoal.assembly.profiling import (
    FEWEST_STEPS,
    MOST_STEPS,
    RECORDED_S,
    Profile,
    gathered,
    offset_of,
    profile_of,
    setup_of,
)
from shoal.assembly.run import Run
from shoal.data.feed import FedStep
from shoal.engine.loop import StepFeed
from shoal.errors import EnvironmentFault
from shoal.files import read_file
from shoal.observe.profile.bottleneck import Setup
from shoal.observe.profile.recorder import Recorder
from shoal.observe.profile.recording import Recording

PROFILE = "SHOAL_PROFILE"
"""What a script's ranks are to record, a `ProfileOrder` in JSON."""
MOST_BYTES = 1 << 30
THROW_AWAY = (
    "run.steps=1000000",
    "checkpoint.every_steps=0",
    "observe.evaluate_every_steps=0",
    "observe.report=false",
    "observe.page=false",
    'observe.wandb="off"',
)
"""Keys of a run of which only some steps are looked at."""


class ProfileOrder(msgspec.Struct, frozen=True):
    """`warmup` steps that are not recorded, then `steps` (None: as many as take `RECORDED_S` seconds) that are; rank 0
    writes what all have recorded to `file`.
    """

    file: str
    warmup: int
    steps: int | None


class Recorded(msgspec.Struct, frozen=True):
    """What rank 0 writes."""

    recordings: list[Recording]
    setup: Setup


def profiled(run: Run, feed: StepFeed, environ: Mapping[str, str] = os.environ) -> StepFeed:
    """`feed`, recorded where the environment asks for it."""
    if PROFILE not in environ:
        return feed
    return ProfiledFeed(run, feed, msgspec.json.decode(environ[PROFILE], type=ProfileOrder))


def read_profile(file: Path) -> Profile:
    """What the ranks of a script have recorded. Raises `EnvironmentFault` where they ended before."""
    if not file.exists():
        raise EnvironmentFault("the script ended before its steps were recorded: it needs a loop of some dozen steps")
    content = read_file(file, limit_bytes=MOST_BYTES, error=EnvironmentFault, repair="profile fewer steps")
    found = msgspec.msgpack.decode(content, type=Recorded)
    return profile_of(found.recordings, found.setup)


class ProfiledFeed:
    """A feed whose steps are recorded; the process ends when they are."""

    def __init__(self, run: Run, feed: StepFeed, order: ProfileOrder) -> None:
        self._run, self._feed, self._order = run, feed, order
        self._unrecorded = max(order.warmup, run.run_file.data.prefetch_steps + 1)
        self._steps, self._taken, self._last_s = order.steps or 0, 0, time.monotonic()
        self._recorder: Recorder | None = None
        self._stack = ExitStack()

    def next(self) -> FedStep:
        """The next step's microbatches; the step before is over."""
        if self._recorder is not None:
            self._recorder.end(self._taken)
            if self._taken == self._unrecorded + self._steps:
                self._finish(self._recorder)
        elif self._taken == self._unrecorded:
            self._recorder = self._begin()
        self._taken, self._last_s = self._taken + 1, time.monotonic()
        if self._recorder is None:
            return self._feed.next()
        self._recorder.begin()
        fed = self._feed.next()
        self._recorder.has_data()
        return fed

    def _begin(self) -> Recorder:
        run, step_s = self._run, time.monotonic() - self._last_s
        fitting = max(FEWEST_STEPS, int(RECORDED_S / max(step_s, RECORDED_S / MOST_STEPS)))
        self._steps = self._steps or int(run.process.announce("profile/steps", lambda: str(fitting)))
        self._together()
        origin_s = float(run.process.announce("profile", lambda: repr(time.time())))
        recorder = Recorder(run.mesh.ledger, run.device, offset_of(run), origin_s)
        self._stack.enter_context(recorder.recording())
        self._together()
        return recorder

    def _together(self) -> None:
        self._run.step.settle()
        self._run.mesh.world.barrier().wait()

    def _finish(self, recorder: Recorder) -> None:
        self._run.step.settle()
        self._stack.close()
        self._together()
        recordings = gathered(self._run, recorder.result(self._run.mesh.rank, socket.gethostname(), {}))
        if recordings is not None:
            recorded = Recorded(recordings, setup_of(self._run.run_file, self._run.process.place))
            Path(self._order.file).write_bytes(msgspec.msgpack.encode(recorded))
        sys.stdout.flush()
        os._exit(0)
