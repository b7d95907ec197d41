"""One rank of `shoal profile`: steps of the run under a profiler, and at rank 0 what all ranks recorded.

Training starts from fresh weights and nothing is saved. The first steps are not recorded: compiled code, caches and
the samples that were read ahead make them unlike the others.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
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
from shoal.data.feed import Feed
from shoal.launch.environment import Place
from shoal.observe.profile.arrivals import Joined, exposed, joined
from shoal.observe.profile.bottleneck import Bottleneck, Measured, Setup, bottleneck
from shoal.observe.profile.evidence import rounds
from shoal.observe.profile.flame import flame_graph, flame_program
from shoal.observe.profile.recorder import Recorder
from shoal.observe.profile.recording import Recording
from shoal.observe.profile.sources import sources
from shoal.observe.profile.split import operators, split
from shoal.observe.progress_bar import ProgressBar, track
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
        cores=max(1, len(os.sched_getaffinity(0)) // place.local_world_size),
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
        begin_s = monotonic()
        if recorder is None:
            self.train(self.feed.next())
        else:
            recorder.step(self.number, self.feed.next, self.train)
        self.last_s = monotonic() - begin_s

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
    return repr(time())


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
