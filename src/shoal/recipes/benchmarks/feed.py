"""`shoal bench feed`: how long a step waits for its data, as it is, and with reading slowed to just under the need.

First the run is measured as it is. Then every sample takes so long to read that one reader is busy for 95 % of a step.
The peer is what a loop without read-ahead would do: it would wait for all of that.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shoal.checkpoint.agreement import LocalExchange
from shoal.data.build import Dataset
from shoal.data.sample import Source
from shoal.engine.loop import take_step
from shoal.launch.environment import Place
from shoal.observe.events import read_events
from shoal.recipes.benchmarks.gpt_job import gpt_job
from shoal.recipes.benchmarks.paired import check
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import Setting, set_up
from shoal.runfile.run_file import RunFile

WAITING = 0.02
NEED = 0.95
SLACK_S = 0.02
WARM_UP_STEPS = 5


class Slowed:
    """A source that gives one sample every `sample_s` seconds, collation included; it has no fast path.

    It is paced by the clock, since sleeps overshoot: a delay is made up for within `SLACK_S`.
    """

    def __init__(self, source: Source, sample_s: float) -> None:
        self._source, self._sample_s, self._free_s = source, sample_s, 0.0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        now_s = time.perf_counter()
        self._free_s = max(self._free_s, now_s - SLACK_S) + self._sample_s
        time.sleep(max(0.0, self._free_s - now_s))
        return self._source[index]


def measure(run_file: RunFile, place: Place, *, steps: int) -> dict[str, Any] | None:
    """The row of one recipe and its checks; None on all ranks but the first."""
    setting = set_up(run_file, place, UserObjects())
    samples = run_file.batch.global_samples // place.world_size
    as_it_is, step_s = _waiting(setting, steps)
    sample_s = float(setting.announce("sample_s", lambda: str(NEED * step_s / samples)))
    slow = dataclasses.replace(setting, data=Dataset(Slowed(setting.data.train, sample_s)))
    slowed, slowed_step_s = _waiting(slow, steps)
    if place.rank != 0:
        return None
    name = run_file.run.name
    row = {
        "recipe": name,
        "step_ms": round(1e3 * step_s, 2),
        "waiting": round(as_it_is, 5),
        "reading_slowed_to_ms": round(1e3 * sample_s * samples, 2),
        "slowed_step_ms": round(1e3 * slowed_step_s, 2),
        "waiting_when_slowed": round(slowed, 5),
        "waiting_without_read_ahead": round(sample_s * samples / (step_s + sample_s * samples), 3),
    }
    return {
        "row": row,
        "checks": [
            check(f"waiting for data, {name}", as_it_is, WAITING, at_most=True),
            check(f"waiting for data, reading slowed, {name}", slowed, WAITING, at_most=True),
        ],
    }


def _waiting(setting: Setting, steps: int) -> tuple[float, float]:
    """The share of the steps' time that was spent waiting for data, and the median step's seconds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        job = gpt_job(setting, folder, stack, exchange=LocalExchange(), ranks=1)
        stack.callback(job.step.sync.close)
        for _ in range(WARM_UP_STEPS + steps):
            take_step(job)
        events = read_events(folder, setting.place.rank)[WARM_UP_STEPS:]
    step_s = [event.get("time/step") or 0.0 for event in events]
    return sum(event.get("time/data") or 0.0 for event in events) / sum(step_s), statistics.median(step_s)
