"""`shoal tune lr`: one short run whose rate rises from step to step, and what its losses say about the rate.

A learning rate range test (Smith, arXiv:1506.01186, 3.3): with n steps from a to b, step k has the rate

    a (b / a)^((k - 1) / (n - 1))

The run is one of `shoal train`, in the layout of the run file, with all its ranks. Losses are smoothed by the mean over
`WINDOW` of the steps around each, which unlike a moving average of the past does not move the curve to higher rates.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import EnvironmentFault, UsageError
from shoal.launcher.children import THROWN_AWAY_S, interrupted_by_sigterm, wait_for
from shoal.observe.events import read_events, series
from shoal.optim.config import Schedule
from shoal.optim.declared import Common
from shoal.optim.kinds import Searching
from shoal.optim.schedule import peak_rate
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

WINDOW = 0.1
"""A share of the steps."""
FALL = 0.02
"""The least that the smoothed loss must fall, as a share of where it begins, for a rate to be told from its noise."""
BELOW_LOWEST = 10.0
"""The suggested rate is at most the one of the lowest loss divided by this: there it is about to rise."""
_OK = (0, 4)
"""Exit codes of a run that has come to its end, or diverged, as it should."""


class Found(msgspec.Struct, frozen=True):
    """The curve, and what it says, as values of `optimizer.lr`.

    `steepest`: where the loss falls fastest; `lowest`: where it is lowest; `diverges`: from where on it is above its
    beginning, None if it never was. `beside`: other keys of rates, with what they had there.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    steepest: float
    lowest: float
    diverges: float | None
    suggested: float
    beside: dict[str, float] = msgspec.field(default_factory=dict)


def rates_between(first: float, last: float, steps: int) -> list[float]:
    """The rate of each step."""
    return [first * (last / first) ** (number / (steps - 1)) for number in range(steps)]


def overrides_of(run_file: RunFile, rates: Sequence[float], directory: Path) -> list[str]:
    """The keys that make a run of `run_file` a range test: a chain of linear phases, each of one step.

    Raises `UsageError` for an optimizer whose rate cannot rise.
    """
    optimizer = run_file.optimizer
    if isinstance(optimizer, Searching) or optimizer.keeps_average:
        why = "looks for the length of a step" if isinstance(optimizer, Searching) else "averages at a constant rate"
        raise UsageError(
            f'optimizer.kind = "{optimizer.variant}" {why}, so that a rate that rises says nothing of it: compare '
            "whole runs by shoal sweep"
        )
    factor, _ = peak_rate(msgspec.structs.replace(optimizer, lr=1.0), global_samples=run_file.batch.global_samples)
    peak = rates[-1] / factor
    phases = [f'{{kind = "linear", final_fraction = {rate / rates[-1]!r}, steps = 1}}' for rate in rates[:-1]]
    phases.append('{kind = "linear", final_fraction = 1.0}')
    plain = msgspec.to_builtins(Schedule())  # what the file says of its own schedule goes
    return [
        f"run.steps={len(rates)}",
        f"run.directory={msgspec.json.encode(str(directory)).decode()}",
        f"optimizer.lr={peak!r}",
        *_rates_beside_of(optimizer, peak),
        *(f"schedule.{key}={msgspec.json.encode(value).decode()}" for key, value in plain.items()),
        'schedule.kind="chained"',
        f"schedule.phases=[{', '.join(phases)}]",
        "checkpoint.every_steps=0",
    ]


def rates_beside(optimizer: Common, lr: float) -> dict[str, float]:
    """The keys of a run file that say rates beside `optimizer.lr`, of AdamW's part and of groups with kinds of their
    own, in their proportion to it where it is `lr`.
    """
    own, times = getattr(optimizer, "adamw_lr", None), lr / optimizer.lr if optimizer.lr else 1.0
    groups = {pattern: group.table.lr * times for pattern, group in optimizer.groups.items() if group.table is not None}
    found = {f'optimizer.groups."{pattern}".lr': rate for pattern, rate in groups.items()}
    return found if own is None else {"optimizer.adamw_lr": own * times} | found


def _rates_beside_of(optimizer: Common, peak: float) -> list[str]:
    """The overrides that keep the proportion."""
    rates, groups = rates_beside(optimizer, peak), dict[str, dict[str, Any]]()
    for pattern, group in optimizer.groups.items():
        said = {key: value for key, value in msgspec.to_builtins(group).items() if value is not None}
        own = rates.get(f'optimizer.groups."{pattern}".lr')
        groups[pattern] = said if own is None else said | {"lr": own}
    found = [f"{key}={rate!r}" for key, rate in rates.items() if key == "optimizer.adamw_lr"]
    return found if not groups else [*found, f"optimizer.groups={json.dumps(groups, separators=(', ', ' = '))}"]


def range_test(
    file: Path, overrides: Sequence[str], *, first: float, last: float, steps: int, directory: Path
) -> Found:
    """Trains in `directory`, which is empty. Raises `EnvironmentFault` where the run fails by anything but its rate."""
    run_file = load_run(file, overrides)
    own = [*overrides, *overrides_of(run_file, rates_between(first, last, steps), directory / "run")]
    load_run(file, own)
    output = directory / "output.txt"
    command = [sys.executable, "-m", "shoal", "train", str(file), *own]
    with output.open("wb") as stream, interrupted_by_sigterm():
        code = wait_for(subprocess.Popen(command, stdout=stream, stderr=stream), patience_s=THROWN_AWAY_S)
    events = read_events(directory / "run")
    measured, losses = series(events, "lr")[1], series(events, "loss/train")[1]
    if code not in _OK or not losses:
        said = output.read_text(errors="replace").strip().splitlines()
        raise EnvironmentFault(
            f"the range test ended with exit code {code} at step {len(losses)}: "
            f"{said[-1] if said else 'it said nothing'}"
        )
    one = msgspec.structs.replace(run_file.optimizer, lr=1.0)
    factor, _ = peak_rate(one, global_samples=run_file.batch.global_samples)
    found = judge([rate / factor for rate in measured], losses)
    return msgspec.structs.replace(found, beside=rates_beside(run_file.optimizer, found.suggested))


def judge(rates: Sequence[float], losses: Sequence[float]) -> Found:
    """What the curve says. Raises `UsageError` where the loss did not fall at any rate."""
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    curve = smoothed(losses[:finite], max(1, round(WINDOW * len(losses) / 2)))
    if len(curve) < 3:
        raise UsageError(f"the loss was not finite from step {finite + 1} on: begin with a lower rate (--from)")
    lowest = min(range(len(curve)), key=curve.__getitem__)
    if curve[0] - curve[lowest] < FALL * abs(curve[0]):
        raise UsageError(
            f"the loss stayed at {curve[0]:.4g} (lowest: {curve[lowest]:.4g}) from rate {rates[0]:g} to {rates[-1]:g}: "
            "give other rates by --from and --to, or more --steps"
        )
    slopes = [(curve[i + 1] - curve[i - 1]) / math.log(rates[i + 1] / rates[i - 1]) for i in range(1, lowest)]
    steepest = rates[1 + min(range(len(slopes)), key=slopes.__getitem__)] if slopes else rates[lowest]
    worse = (i for i in range(lowest, len(curve)) if curve[i] > curve[0])
    diverges = next(worse, finite if finite < len(losses) else None)
    return Found(
        rates=list(rates),
        losses=[loss if math.isfinite(loss) else math.inf for loss in losses],
        smoothed=curve,
        steepest=steepest,
        lowest=rates[lowest],
        diverges=None if diverges is None else rates[diverges],
        suggested=_rounded(min(steepest, rates[lowest] / BELOW_LOWEST)),
    )


def smoothed(losses: Sequence[float], reach: int) -> list[float]:
    """The mean over `reach` losses on either side, fewer at the ends."""
    count = len(losses)
    parts = [
        losses[max(0, i - min(reach, i, count - 1 - i)) : i + min(reach, i, count - 1 - i) + 1] for i in range(count)
    ]
    return [sum(part) / len(part) for part in parts]


def in_characters(found: Found, *, width: int = 64, height: int = 12) -> list[str]:
    """The smoothed loss over the logarithm of the rate, in characters; `^` below the suggested rate."""
    low, start = min(found.smoothed), found.smoothed[0]
    high = start + 0.25 * (start - low)
    first, last = math.log(found.rates[0]), math.log(found.rates[-1])
    rows = [[" "] * width for _ in range(height)]

    def column(rate: float) -> int:
        return min(width - 1, max(0, round((math.log(rate) - first) / (last - first) * (width - 1))))

    for rate, loss in zip(found.rates, found.smoothed, strict=False):
        share = (min(loss, high) - low) / (high - low)
        rows[height - 1 - round(share * (height - 1))][column(rate)] = "*"
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    ends = f"{found.rates[0]:.3g}".ljust(width - 8) + f"{found.rates[-1]:.3g}".rjust(8)
    mark = " " * column(found.suggested) + "^"
    body = [f"{label.rjust(margin)} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    return [*body, f"{' ' * margin} +{'-' * width}", f"{' ' * margin}  {mark}", f"{' ' * margin}  {ends}"]


def draw(found: Found, path: Path) -> None:
    """The same as a picture in a file, with every loss."""
    # Half a second of imports that nobody else should wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(found.rates[: len(found.smoothed)], found.losses[: len(found.smoothed)], ".", color="#9fb0b6")
    axes.plot(found.rates[: len(found.smoothed)], found.smoothed, color="#0b7a75")
    axes.axvline(found.suggested, color="#b3261e", linewidth=1)
    start, low = found.smoothed[0], min(found.smoothed)
    axes.set_ylim(low - 0.1 * (start - low), start + 0.5 * (start - low))
    axes.set_xscale("log")
    axes.set_xlabel("optimizer.lr")
    axes.set_ylabel("loss/train")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _rounded(rate: float) -> float:
    """To two digits."""
    return float(f"{rate:.1e}")
