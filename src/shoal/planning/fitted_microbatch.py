"""`memory.fit_microbatch`: the largest microbatch that fits, tried before any rank starts.

A step is a sum over its microbatches, so their size changes what is held at a time and not what is computed. Sizes are
those that cut a rank's share of a step into 1, 2, 3, ... parts. Under `memory.simulate_device` the planner says which
should fit, elsewhere the largest is tried first. A trial takes three steps of the run, of `batch.global_samples` each,
and running out of memory (exit code 5) is its answer. From there on sizes are tried in distances of 1, 2, 4, ..., and
halved between one that fits and one that does not.

What was found lies in `microbatch.json` of the run directory: ranks read it, and a run that goes on keeps it. A run
that needs more memory later, as by a longer sample, is started again with the next size, from its newest checkpoint if
there is one. Where two such starts take it no step further, the microbatch is not what is too large, and the run ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from shoal import units
from shoal.config.named import GIVEN
from shoal.errors import ConfigError, LayoutError, OutOfMemory, ShoalError
from shoal.files import read_json
from shoal.launcher.children import interrupted_by_sigterm
from shoal.launcher.devices import gpus
from shoal.launcher.environment import Place
from shoal.observe.events import read_events
from shoal.observe.facts import replace_file
from shoal.planning.memory_budget import MOST_BYTES, digest_of
from shoal.planning.trial import TRIED_STEPS, short_run
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, run_directory, statistics_group

FILE_NAME = "microbatch.json"
MOST_PARTS = 4096
MOST_VAIN = 2
"""Starts in a row that come no further than the one before them."""


class Tried(msgspec.Struct, frozen=True):
    """A size, and whether it fits."""

    micro_samples: int
    fits: bool


class Fitted(msgspec.Struct, frozen=True):
    """What was tried, of a run file whose `digest` says which, and the size that the run uses. `reached` is the last
    step of the starts that ran out of memory, and `vain` counts those in a row that came no further.
    """

    digest: str
    micro_samples: int
    tried: list[Tried]
    reached: int | None = None
    vain: int = 0


def with_microbatch(run_file: RunFile, place: Place | None, *, keeps: bool = True) -> tuple[RunFile, str]:
    """The run file with the largest size that fits, and a sentence on it. `place` is None in the process that starts
    the ranks. Unless it `keeps` something, only what was found by a run is taken.

    Raises `ConfigError` where nothing can be tried or a trial fails, `LayoutError` where no size fits.
    """
    _require_named(run_file)
    path, digest = run_directory(run_file) / FILE_NAME, digest_of(run_file)
    fitted = _kept(path)
    if fitted is None or fitted.digest != digest:
        if place is not None:
            raise ConfigError(
                f"memory.fit_microbatch under {place.launcher}: what fits is tried once, by whoever starts the ranks; "
                "start the run with shoal train, or write batch.micro_samples as its run.toml has it"
            )
        if not keeps:
            raise ConfigError(
                "memory.fit_microbatch, and no run of this run file has tried yet what fits: here nothing is kept; set "
                "memory.fit_microbatch=false and batch.micro_samples"
            )
        with interrupted_by_sigterm():
            fitted = _fit(run_file, digest)
        _write(path, fitted)
    return _cut(run_file, fitted.micro_samples), _said(fitted)


def made_smaller(run_file: RunFile) -> str | None:
    """After a rank of the run has run out of memory: the next smaller size is written down, and a sentence on it is
    returned. None where the size was not fitted, there is no smaller one, or smaller ones have not helped.
    """
    path = run_directory(run_file) / FILE_NAME
    fitted = _kept(path) if run_file.memory.fit_microbatch else None
    if fitted is None or fitted.digest != digest_of(run_file):
        return None
    smaller = [size for size in sizes(run_file) if size < fitted.micro_samples]
    reached = max((event.step for event in read_events(run_directory(run_file))), default=0)
    vain = fitted.vain + 1 if fitted.reached is not None and reached <= fitted.reached else 0
    if not smaller or vain == MOST_VAIN:
        return None
    tried = [*fitted.tried, Tried(fitted.micro_samples, fits=False)]
    _write(path, Fitted(fitted.digest, smaller[0], tried, reached, vain))
    return (
        f"memory.fit_microbatch: {units.plural(fitted.micro_samples, 'sample')} at a time did not fit in the end; the "
        f"run starts again with {smaller[0]}, from its newest checkpoint if there is one"
    )


def sizes(run_file: RunFile) -> list[int]:
    """Samples of a microbatch that cut a rank's share of a step into 1, 2, 3, ... parts, in whole groups of samples
    that the model takes together: the largest first.
    """
    layout = run_file.layout.layout(run_file.run.processes or 1)
    share = -(-run_file.batch.global_samples // (layout.replicate * layout.shard))
    group = statistics_group(run_file.model)
    found = {-(-share // (parts * group)) * group for parts in range(1, min(share, MOST_PARTS) + 1)}
    return sorted(found, reverse=True)


def first_that_fits(count: int, first: int, fits: Callable[[int], bool]) -> int | None:
    """The least number below `count` that `fits`, where all behind one that does do so, too; None: there is none.
    `first` is asked first, then those in distances of 1, 2, 4, ..., then those between.
    """
    short, enough, distance, asked = -1, count, 1, first
    while True:
        if fits(asked):
            enough = asked
        else:
            short = asked
        if enough - short == 1:
            return enough if enough < count else None
        if short >= 0 and enough < count:
            asked = (short + enough) // 2
        else:
            asked = max(0, enough - distance) if enough < count else min(count - 1, short + distance)
            distance *= 2


def _require_named(run_file: RunFile) -> None:
    """Raises `ConfigError` for what a trial, which is a run of a run file, could not make again."""
    tables = {"model": run_file.model, "data": run_file.data, "loss": run_file.loss}
    given = [name for name, table in tables.items() if getattr(table, "build", None) == GIVEN]
    if given:
        raise ConfigError(
            f"memory.fit_microbatch, and the {' and the '.join(given)} of the run are objects of a script, which a "
            "trial cannot make again: set batch.micro_samples (samples of one forward and backward) instead"
        )


def _fit(run_file: RunFile, digest: str) -> Fitted:
    if run_file.memory.simulate_device is None and (run_file.run.device == "cpu" or not gpus(os.environ)):
        raise ConfigError(
            "memory.fit_microbatch on CPUs, where nothing is refused until the machine is full: say what a rank may "
            'hold with memory.simulate_device, such as "4 GiB", or set batch.micro_samples'
        )
    own = [size for size in sizes(run_file) if refusal(_cut(run_file, size)) is None]
    if not own:
        raise ConfigError(f"memory.fit_microbatch cannot cut a step: {refusal(_cut(run_file, sizes(run_file)[-1]))}")
    tried, words = list[Tried](), dict[int, str]()

    def fits(index: int) -> bool:
        why = _why_not(_cut(run_file, own[index]))
        tried.append(Tried(own[index], fits=why is None))
        words[own[index]] = why or ""
        return why is None

    found = first_that_fits(len(own), _predicted(run_file, own), fits)
    if found is None:
        raise LayoutError(
            f"memory.fit_microbatch: not even {units.plural(own[-1], 'sample')} at a time fit; set memory.recompute or "
            f"memory.offload, or split the model over more ranks (layout.shard). What the trial said: {words[own[-1]]}"
        )
    return Fitted(digest, own[found], tried)


def _predicted(run_file: RunFile, own: Sequence[int]) -> int:
    """The first of the sizes that fits by the planner's closed forms; the largest where they say nothing."""
    from shoal.planning.memory_advice import fullest_bytes, predictor_of_ranks  # imports torch

    limit_bytes = run_file.memory.simulated_bytes
    with contextlib.suppress(ShoalError):  # this run cannot be priced
        predictor = predictor_of_ranks(run_file)
        for index, size in enumerate(own if limit_bytes is not None else ()):
            if fullest_bytes(predictor, _cut(run_file, size)) <= (limit_bytes or 0):
                return index
        return len(own) - 1 if limit_bytes is not None else 0
    return 0


def _why_not(run_file: RunFile) -> str | None:
    """What some of its largest steps say that run out of memory; None: they fit. Raises `ConfigError` where they fail
    for another reason.
    """
    replaced = msgspec.structs.replace
    run_file = replaced(run_file, batch=replaced(run_file.batch, schedule=(), adaptive=None))
    folder = Path(mkdtemp(prefix="shoal-microbatch-"))  # a TemporaryDirectory would end with the first fork that does
    try:
        code, said = short_run(run_file, folder, steps=TRIED_STEPS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if code not in (0, OutOfMemory.exit_code):
        raise ConfigError(f"memory.fit_microbatch: a trial of {run_file.batch.micro_samples} samples failed: {said}")
    return said if code else None


def _cut(run_file: RunFile, micro_samples: int) -> RunFile:
    replaced = msgspec.structs.replace
    batch = replaced(run_file.batch, micro_samples=min(micro_samples, run_file.batch.global_samples))
    return replaced(run_file, batch=batch, memory=replaced(run_file.memory, fit_microbatch=False))


def _said(fitted: Fitted) -> str:
    others = [one for one in fitted.tried if one.micro_samples != fitted.micro_samples]
    short = ", ".join(str(one.micro_samples) for one in others if not one.fits)
    larger = f" ({short} did not fit)" if short else ""
    return f"memory.fit_microbatch: {units.plural(fitted.micro_samples, 'sample')} at a time{larger}"


def _kept(path: Path) -> Fitted | None:
    if not path.is_file():
        return None
    return read_json(path, Fitted, limit_bytes=MOST_BYTES, error=ConfigError, repair="remove it; it is written anew")


def _write(path: Path, fitted: Fitted) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.encode(fitted) + b"\n")
