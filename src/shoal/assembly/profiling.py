"""One rank of `shoal profile`: steps of the run under a profiler, and at rank 0 what all ranks recorded.

Training starts from fresh weights and nothing is saved. The first steps are not recorded: compiled code, caches and
the samples that were read ahead make them unlike the others.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from torch._C._distributed_c10d import Store

from shoal import units
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import Run, open_run
from shoal.codec.config import BlockwiseConfig, NoCodec
from shoal.comm.board import Board
from shoal.comm.clock import ClockOffset, measure_offset
from shoal.data.feed import FedStep, Feed
from shoal.engine.loop import StepFeed
from shoal.errors import EnvironmentFault, UsageError
from shoal.files import read_file
from shoal.launcher.devices import cores
from shoal.launcher.environment import Place
from shoal.launcher.own_script import PROFILE
from shoal.observe.profile.bottleneck import Bottleneck, Measured, Setup, bottleneck
from shoal.observe.profile.recorder import Recorder, sources
from shoal.observe.profile.recording import Joined, Recording, exposed, joined, rounds
from shoal.observe.profile.split import operators, split
from shoal.observe.profile.trace import flame_graph, flame_program
from shoal.observe.terminal import ProgressBar, track
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile

GATHER_S = 600.0
"""What a rank may take to send its recording to rank 0."""
NAMED_OPERATORS = 12
RECORDED_S = 3.0
"""Long enough that another program's moment is not taken for a rank's slowness."""
FEWEST_STEPS, MOST_STEPS = 5, 50
FLAME_STEPS = 20


@dataclass(frozen=True)
class Profile:
    """What rank 0 knows in the end."""

    recordings: Sequence[Recording]
    ranks: Sequence[Measured]
    bottleneck: Bottleneck


def profile_rank(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    *,
    warmup: int,
    steps: int | None,
    flame: tuple[int, Path] | None = None,
    environ: Mapping[str, str] = os.environ,
    store: Store | None = None,
    bar: ProgressBar | None = None,
) -> Profile | None:
    """Takes `warmup` steps and `steps` recorded ones. The profile at rank 0, None at the others.

    `steps`: None: as many as take `RECORDED_S` seconds, by those before them, within `FEWEST_STEPS` and `MOST_STEPS`.
    `store` is where ranks meet, None: the one that the launcher told of. `flame`: a rank, and where its flame graph
    goes. Raises what training raises, `MissingExtra` for a flame graph without py-spy.
    """
    if flame is not None and flame[0] == place.rank:
        flame_program()
    bar = bar or ProgressBar()
    run = open_run(run_file, place, objects, environ=environ, store=store, activity=bar.update)
    with ExitStack() as stack:
        loop = _Loop(run, stack.enter_context(closing(run.feed())))
        unrecorded = max(warmup, run_file.data.prefetch_steps + 1)
        for _ in track(range(unrecorded), bar, "taking steps that are not recorded", total=unrecorded):
            loop.step()
        steps = _steps(run, loop) if steps is None else steps
        bar.update(f"recording {units.plural(steps, 'step')}")
        recording = _recorded(loop, steps)
        if flame is not None:
            bar.update("drawing the flame graph")
            with flame_graph(flame[1]) if flame[0] == place.rank else ExitStack():
                loop.together()
                for _ in range(FLAME_STEPS):
                    loop.step()
                loop.together()
    bar.update("reading the recordings of all ranks")
    recordings = gathered(run, recording)
    return None if recordings is None else profile_of(recordings, setup_of(run_file, place))


def profile_of(recordings: Sequence[Recording], setup: Setup) -> Profile:
    """What the recordings of all ranks say."""
    ranks, calls = measured(recordings), joined(recordings)
    by_round = [measured(each, calls) for each in zip(*(rounds(one) for one in recordings), strict=True)]
    return Profile(recordings, ranks, bottleneck(ranks, setup, rounds=by_round))


def measured(recordings: Sequence[Recording], calls: dict[str, Joined] | None = None) -> list[Measured]:
    """The figures of each rank. `calls`: those of all ranks; None: as far as these recordings hold them."""
    calls = joined(recordings) if calls is None else calls
    return [
        Measured(split(recording), exposed(recording, calls), operators(recording), recording.sources)
        for recording in recordings
    ]


def setup_of(run_file: RunFile, place: Place) -> Setup:
    """What the advice depends on."""
    replicas = run_file.layout.layout(place.world_size).replicate
    coded = replace(run_file, codec=BlockwiseConfig())
    compiled = replace(run_file, run=replace(run_file.run, compile=True))
    return Setup(
        readers=run_file.data.readers,
        reader_kind=run_file.data.reader_kind,
        prefetch_steps=run_file.data.prefetch_steps,
        cores=max(1, cores() // place.local_world_size),
        codec_helps=isinstance(run_file.codec, NoCodec) and replicas > 1 and refusal(coded) is None,
        may_compile=not run_file.run.compile and refusal(compiled) is None,
    )


@dataclass
class _Loop:
    """Steps of the run, one after the other."""

    run: Run
    feed: Feed
    number: int = 0
    last_s: float = 0.0
    """What the last step took."""

    def step(self, recorder: Recorder | None = None) -> None:
        self.number += 1
        begin_s = time.monotonic()
        if recorder is None:
            self.train(self.feed.next())
        else:
            recorder.step(self.number, self.feed.next, self.train)
        self.last_s = time.monotonic() - begin_s

    def train(self, fed: Any) -> None:
        rate = self.run.rate(min(self.number, self.run.run_file.run.steps))
        self.run.state.progress.advance(fed.interval)
        self.run.step(self.number, fed.microbatches, lr=rate)

    def together(self) -> None:
        """Returns when every rank has done its steps."""
        self.run.step.settle()
        self.run.mesh.world.barrier().wait()


def _steps(run: Run, loop: _Loop) -> int:
    """As rank 0 finds it, on all ranks."""
    fitting = int(RECORDED_S / max(loop.last_s, RECORDED_S / MOST_STEPS))
    return int(run.process.announce("profile/steps", lambda: str(max(FEWEST_STEPS, fitting))))


def _recorded(loop: _Loop, steps: int) -> Recording:
    run = loop.run
    loop.together()
    recorder = Recorder(run.mesh.ledger, run.device, offset_of(run), float(run.process.announce("profile", _now)))
    with recorder.recording():
        loop.together()
        for _ in range(steps):
            loop.step(recorder)
        run.step.settle()
    loop.together()
    recording = recorder.result(run.mesh.rank, socket.gethostname(), {})
    names = {operator.name for operator in operators(recording)[:NAMED_OPERATORS]}
    return replace(recording, sources=sources(loop.step, names))


def offset_of(run: Run) -> ClockOffset:
    world = run.mesh.layout.world_size
    return measure_offset(run.process.store, rank=run.mesh.rank, ranks=world, name="profile")


def _now() -> str:
    return repr(time.time())


def gathered(run: Run, recording: Recording) -> list[Recording] | None:
    """All ranks' recordings in rank order, at rank 0."""
    board = Board(run.process.store, timeout_s=GATHER_S).under("profile")
    keys = [f"rank-{rank}" for rank in range(run.mesh.layout.world_size)]
    board.publish(keys[run.mesh.rank], zlib.compress(msgspec.msgpack.encode(recording), 1))
    if run.mesh.rank != 0:
        board.collect(["read"])
        return None
    found = [msgspec.msgpack.decode(zlib.decompress(text), type=Recording) for text in board.collect(keys)]
    board.publish("read", "")
    return found


# The steps of a script under a profiler: `shoal profile mine.py`, whichever loop the script has.
#
# A loop of any kind takes each step's samples from the feed, so a step is what happens from one `next` to the following
# one. After the last recorded step the ranks end: nothing of the script that follows is run, and nothing is saved.


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
    writes what all have recorded to `file`. Then some more for `flame`: a rank, and where its flame graph goes.
    """

    file: str
    warmup: int
    steps: int | None
    flame: tuple[int, str] | None = None


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
        raise EnvironmentFault(
            "the script ended before its steps were recorded: it needs a call of shoal.train or shoal.start, and a "
            "loop of some dozen steps"
        )
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
        self._drawing_until = 0
        self._stack = ExitStack()
        ranks = run.process.place.world_size
        if order.flame is not None and order.flame[0] >= ranks:
            raise UsageError(f"--flame-rank is {order.flame[0]}, and the ranks are 0 to {ranks - 1}: name one of them")

    def next(self) -> FedStep:
        """The next step's microbatches; the step before is over."""
        if self._recorder is not None:
            self._recorder.end(self._taken)
            if self._taken == self._unrecorded + self._steps:
                self._write(self._recorder)
                self._recorder = None
                self._draw()
        elif self._taken == self._unrecorded:
            self._recorder = self._begin()
        if self._taken == self._drawing_until > 0:
            self._leave()
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

    def _write(self, recorder: Recorder) -> None:
        self._run.step.settle()
        self._stack.close()
        self._together()
        recordings = gathered(self._run, recorder.result(self._run.mesh.rank, socket.gethostname(), {}))
        if recordings is not None:
            recorded = Recorded(recordings, setup_of(self._run.run_file, self._run.process.place))
            Path(self._order.file).write_bytes(msgspec.msgpack.encode(recorded))

    def _draw(self) -> None:
        """Begins the steps of the flame graph, if there is to be one."""
        self._drawing_until, flame = self._taken, self._order.flame
        if flame is None:
            return
        self._drawing_until += FLAME_STEPS
        if flame[0] == self._run.mesh.rank:
            self._stack.enter_context(flame_graph(Path(flame[1])))
        self._together()

    def _leave(self) -> None:
        """Every rank ends here, whatever the script would do next."""
        self._run.step.settle()
        self._stack.close()
        self._together()
        sys.stdout.flush()
        os._exit(0)
