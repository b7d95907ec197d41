"""`memory.budget`: the cheapest mixture that fits, measured before any rank starts; what was chosen is written down.

A mixture is a set of keys of `[memory]` that leaves every bit of the losses as it is: recomputation, and where state,
activations and parameters live. They are tried from the cheapest on, each by three steps of the run itself on a
simulated device that refuses nothing. Its peak is that of every later step where what a step allocates does not depend
on its data. Where it does, as experts get other numbers of tokens, the later steps of a trial differ: what they differ
by is asked for once more. The run is then held to the budget by the same ledger.

The choice lies in `memory.json` of the run directory, with the bill: ranks read it, and a run that goes on keeps it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from shoal import units
from shoal.checkpoint.config import CheckpointConfig
from shoal.config.load import dumps
from shoal.errors import ConfigError, LayoutError
from shoal.files import read_json
from shoal.launcher import warm
from shoal.launcher.devices import gpus
from shoal.launcher.environment import Place
from shoal.memory.config import MemoryConfig, OffloadConfig
from shoal.observe.config import ObserveConfig
from shoal.observe.events import read_events
from shoal.observe.facts import replace_file
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, run_directory

FILE_NAME = "memory.json"
MOST_BYTES = 1 << 20
TRIED_STEPS = 3
"""State is made in the first, and comes and goes in the others."""
PART_SHARE, LEAST_PART, MOST_PART = 32, 64 << 10, 32 << 20
"""A part of the state is such a share of the budget, within bounds: three of them are on the device."""
BOUNDLESS = "1024 GiB"

MIXTURES: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "host"},
    {"optimizer": "host", "recompute": "selective"},
    {"optimizer": "host", "recompute": "operators"},
    {"optimizer": "host", "activations": "host"},
    {"optimizer": "host", "recompute": "full"},
    {"optimizer": "host", "recompute": "full", "activations": "host"},
    {"optimizer": "host", "recompute": "full", "activations": "host", "parameters": "host"},
)
"""The cheapest first."""
HOMES = ("optimizer", "activations", "parameters")


class Tried(msgspec.Struct, frozen=True):
    """A mixture, what it says in a run file, and its peak on the fullest rank; None: it did not run, for `why`."""

    keys: str
    memory: dict[str, Any]
    peak_bytes: int | None
    why: str = ""


class FirstSteps(NamedTuple):
    """What the fullest rank needs, and the loss of each step."""

    peak_bytes: int
    losses: list[float]


class Bill(msgspec.Struct, frozen=True):
    """What was tried for a budget, of a run file whose `digest` says which; the last one is what the run uses."""

    budget: str
    digest: str
    tried: list[Tried]


Peak = Callable[[RunFile], tuple[int | None, str]]
"""Of the fullest rank in some steps of a run; or None, and why there is none."""


def with_budget(run_file: RunFile, place: Place | None, *, peak: Peak | None = None) -> tuple[RunFile, str]:
    """The run file with the mixture, and a sentence on it. `place` is None in the process that starts the ranks. `peak`
    tries a mixture; None: by `first_steps` in processes of their own.

    Raises `ConfigError` where nothing can be tried, `LayoutError` where nothing fits.
    """
    path, digest = run_directory(run_file) / FILE_NAME, digest_of(run_file)
    bill = _kept(path)
    if bill is None or bill.digest != digest:
        if place is not None:
            raise ConfigError(
                f"memory.budget under {place.launcher}: what fits is tried once, by whoever starts the ranks; start "
                "the run with shoal train, or write the keys that its run.toml has"
            )
        bill = _try(run_file, digest, peak or peak_of)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(bill) + b"\n")
    return _replaced(run_file, bill.tried[-1].memory, run_file.memory.budget), _said(bill)


def mixtures(run_file: RunFile) -> Iterator[tuple[str, dict[str, Any], RunFile]]:
    """(keys as a run file has them, the table's values, the run file with them), of those that this run can use. What
    the run file says itself stays.
    """
    seen = set()
    for mixture in MIXTURES:
        memory = _memory_with(run_file.memory, mixture)
        changed = _replaced(run_file, memory, BOUNDLESS)
        keys = _keys(run_file.memory, memory)
        if keys not in seen and refusal(changed) is None:
            seen.add(keys)
            yield keys, memory, changed


def _try(run_file: RunFile, digest: str, peak: Peak) -> Bill:
    budget = run_file.memory.budget_bytes or 0
    if run_file.run.device == "cuda" or (run_file.run.device == "auto" and gpus(os.environ)):
        raise ConfigError(
            'memory.budget is tried on CPUs, by a simulated device: set run.device = "cpu", or choose with shoal plan'
        )
    tried: list[Tried] = []
    for keys, memory, changed in mixtures(run_file):
        peak_bytes, why = peak(changed)
        tried.append(Tried(keys, memory, peak_bytes, why))
        if peak_bytes is not None and peak_bytes <= budget:
            return Bill(run_file.memory.budget or "", digest, tried)
    if not tried:
        as_it_is = _replaced(run_file, _memory_with(run_file.memory, {}), run_file.memory.budget)
        raise ConfigError(f"memory.budget needs a simulated device: {refusal(as_it_is)}")
    ran = [one for one in tried if one.peak_bytes is not None]
    if not ran:
        raise LayoutError(f"memory.budget: none of {len(tried)} mixtures ran; the first: {tried[0].why}")
    least = min(ran, key=lambda one: one.peak_bytes or 0)
    raise LayoutError(_short(run_file, least, _met_by(run_file, least, peak)))


def _met_by(run_file: RunFile, least: Tried, peak: Peak) -> str:
    """A budget that the mixture meets, as one writes it. Parts of the state grow with the budget, and the peak with
    them: where they would, the budget is tried.
    """
    memory, peak_bytes = least.memory, least.peak_bytes or 0
    while True:
        budget = _no_less(peak_bytes)
        raised = msgspec.structs.replace(run_file.memory, budget=budget)
        if (mixture := _memory_with(raised, least.memory)) == memory:
            return budget
        found, why = peak(_replaced(run_file, mixture, BOUNDLESS))
        if found is None:
            raise LayoutError(f"memory.budget: {least.keys} ran with less, and does not with {budget}: {why}")
        if found <= units.memory_bytes(budget):
            return budget
        memory, peak_bytes = mixture, found


def _no_less(size_bytes: int) -> str:
    """The size as one writes it, and not less."""
    text = units.memory_size(size_bytes)
    while units.memory_bytes(text) < size_bytes:
        size_bytes += size_bytes // 1000 + 1
        text = units.memory_size(size_bytes)
    return text


def _short(run_file: RunFile, least: Tried, met_by: str) -> str:
    short_bytes = units.memory_bytes(met_by) - (run_file.memory.budget_bytes or 0)
    return (
        f'memory.budget = "{run_file.memory.budget}" is short by {units.memory_size(short_bytes)}: the least that is '
        f"met is {met_by}, with {least.keys}; raise it to that, lower batch.micro_samples, or split the model over "
        "more ranks"
    )


def _said(bill: Bill) -> str:
    *others, used = bill.tried
    beside = f" ({'; '.join(map(_need, others))})" if others else ""
    return f'memory.budget = "{bill.budget}": {_need(used)}{beside}'


def _need(tried: Tried) -> str:
    if tried.peak_bytes is None:
        return f"{tried.keys} did not run: {tried.why}"
    return f"{tried.keys} needs {units.memory_size(tried.peak_bytes)}"


def _memory_with(memory: MemoryConfig, mixture: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a mixture, in the places of those that are at their defaults."""
    default, homes = OffloadConfig(), {name: getattr(memory.offload, name) for name in HOMES}
    offload = {name: mixture.get(name, "device") if home == "device" else home for name, home in homes.items()}
    recompute = mixture.get("recompute", "none") if memory.recompute == "none" else memory.recompute
    part = min(MOST_PART, max(LEAST_PART, (memory.budget_bytes or MOST_PART) // PART_SHARE))
    given = memory.offload.part != default.part
    return {**offload, "recompute": recompute, "part": memory.offload.part if given else f"{part >> 10} KiB"}


def _replaced(run_file: RunFile, memory: Mapping[str, Any], limit: str | None) -> RunFile:
    """Held to `limit`, and without a budget to be met."""
    values = dict(memory)
    recompute, replaced = values.pop("recompute"), msgspec.structs.replace
    offload = replaced(run_file.memory.offload, **values)
    own = replaced(run_file.memory, recompute=recompute, offload=offload, budget=None, simulate_device=limit)
    return replaced(run_file, memory=own)


def _keys(before: MemoryConfig, memory: Mapping[str, Any]) -> str:
    """What the mixture adds, as one writes it."""
    names = [name for name in HOMES if memory[name] != "device"]
    added = [f'memory.offload.{name} = "{memory[name]}"' for name in names]
    if memory["recompute"] != "none":
        added.append(f'memory.recompute = "{memory["recompute"]}"')
    return " and ".join(added) or "the run as it is"


def digest_of(run_file: RunFile) -> str:
    """Of what decides the peak: all but how long it runs, what it keeps, and what it tells."""
    run = msgspec.structs.replace(run_file.run, steps=1, name="", directory=None)
    noise = {key: getattr(run_file.observe, key) for key in ("noise_every_steps", "noise_by_layer")}
    observe = msgspec.structs.replace(ObserveConfig(), **noise)
    own = msgspec.structs.replace(run_file, run=run, checkpoint=CheckpointConfig(), observe=observe)
    return blake3(dumps(own).encode()).hexdigest()


def _kept(path: Path) -> Bill | None:
    if not path.is_file():
        return None
    return read_json(path, Bill, limit_bytes=MOST_BYTES, error=ConfigError, repair="remove it; it is written anew")


def peak_of(run_file: RunFile) -> tuple[int | None, str]:
    """`Peak`, in processes and a folder of their own."""
    folder = Path(mkdtemp(prefix="shoal-budget-"))  # a TemporaryDirectory would end with the first fork that does
    try:
        found = first_steps(run_file, folder, steps=TRIED_STEPS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return (None, found) if isinstance(found, str) else (found.peak_bytes, "")


def first_steps(run_file: RunFile, folder: Path, *, steps: int) -> FirstSteps | str:
    """What the first steps of the run come to, in processes of their own; or why there are none. `folder` is theirs."""
    code, said = short_run(run_file, folder, steps=steps)
    if code != 0:
        return said
    ranks = [read_events(folder / "run", rank=rank) for rank in range(run_file.run.processes or 1)]
    peaks = [[peak for event in own if (peak := event.get("memory/device_peak_bytes")) is not None] for own in ranks]
    losses = [loss for event in ranks[0] if (loss := event.get("loss/train")) is not None]
    return FirstSteps(max(map(needed, peaks)), losses) if all(peaks) else "it took no step"


def needed(peaks: Sequence[float]) -> int:
    """Bytes of a device in whose steps these were the peaks: the highest, and what those after the first differ by."""
    later = peaks[1:] or peaks
    return int(max(peaks) + max(later) - min(later))


def short_run(run_file: RunFile, folder: Path, *, steps: int) -> tuple[int, str]:
    """The exit code of the first steps of the run, whose directory is `run` in `folder`, and why it failed."""
    directory = folder / "run"
    path = folder / "run.toml"
    path.write_text(dumps(hurried(run_file, steps)), encoding="utf-8")
    command = [
        sys.executable, "-m", "shoal", "train", str(path), f"run.directory={directory}", f"run.steps={steps}",
        "checkpoint.every_steps=0", "observe.evaluate_every_steps=0", "observe.report=false",
        "observe.evaluate_samples=1", "observe.sample_bytes=0",
    ]  # fmt: skip
    process = warm.start(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = process.communicate()[1].decode(errors="replace").strip()
    return process.returncode, _cause(said.splitlines()) or f"exit code {process.returncode}"


def hurried(run_file: RunFile, steps: int) -> RunFile:
    """The run file whose first `steps` have all that its run will hold: masks, gates, what freezing compares with."""
    replaced, sparsity, freeze = msgspec.structs.replace, run_file.sparsity, run_file.freeze
    if sparsity is not None:
        last = max(1, steps - 1)
        schedule = replaced(sparsity.schedule, begin=min(sparsity.schedule.begin, last), end=steps, every=1)
        run_file = replaced(run_file, sparsity=replaced(sparsity, schedule=schedule))
    if freeze is not None and freeze.progress is not None:
        progress = replaced(freeze.progress, every=1, patience=steps + 1)
        run_file = replaced(run_file, freeze=replaced(freeze, progress=progress))
    return run_file


def _cause(lines: Sequence[str]) -> str:
    """The line beside that which says which rank failed (`shoal.launcher.failure`); without one, the last."""
    for number, line in enumerate(lines[:-1]):
        if re.match(r"rank \d+ of \d+ failed \(", line):
            return lines[number + 1]
        if re.match(r"\d+ of \d+ ranks failed with this", lines[number + 1]):
            return line
    return lines[-1] if lines else ""
