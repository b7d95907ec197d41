"""Prometheus: one endpoint per host, which says what the host's ranks have written into their events.

It reads the events when it is asked, in a thread of its own: the training loop does nothing for it, and one endpoint
serves all ranks of a host. Gauges hold the newest step that was recorded, counters add up over all steps that this host
computed, those that a restart computed again included. Package prometheus-client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import MissingExtra
from shoal.observe.events import Event, Tail
from shoal.observe.host_usage import GpuUsage, Metric, host_usage, metric_of
from shoal.observe.sink import Ending, RunStart, Sink

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_FILE = re.compile(r"rank-(\d{1,9})\.jsonl")
_HELP = {
    "shoal_step": "Optimizer steps that the rank has done",
    "shoal_steps_recorded": "Steps that the rank has recorded, repeated ones included",
    "shoal_steps_nonfinite": "Steps with a loss or gradient norm that was not finite",
    "shoal_last_step_timestamp_seconds": "Unix time of the newest step",
    "shoal_restarts": "Starts of the rank after its first: each followed a failure or a stop",
    "shoal_generation": "Starts of the run so far, less one",
    "shoal_checkpoint_step": "Step of the newest checkpoint",
}


class PrometheusSink(Sink):
    """Serves the endpoint from the start of the run to its end. A port that is taken is a warning."""

    def __init__(
        self,
        run_directory: Path,
        address: tuple[str, int],
        *,
        ranks: Sequence[int] | None,
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """`address`: host and port. `ranks`: this host's, None: all that have events.

        Raises `MissingExtra` without prometheus-client.
        """
        if find_spec("prometheus_client") is None:
            raise MissingExtra("prometheus-client", extra="prometheus", purpose="observe.prometheus_port")
        self._directory, self._ranks, self._address = run_directory, ranks, address
        self._note, self._warn = note, warn
        self._server: Any = None

    def start(self, run: RunStart) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(self._directory, run=run.name, ranks=self._ranks))
        host, port = self._address
        try:
            self._server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as fault:
            self._warn(
                f"no metrics for Prometheus: nothing can listen at {host}:{port} ({fault.strerror}); training goes on, "
                "and another observe.prometheus_port helps the next start"
            )
        else:
            self._note(f"metrics for Prometheus: http://{host}:{self._server.server_port}/metrics")

    def finish(self, ending: Ending) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class RunCollector:
    """What is exposed of one run; each `collect` first reads the lines that are new."""

    def __init__(self, run_directory: Path, *, run: str, ranks: Sequence[int] | None = None) -> None:
        self._directory, self._run, self._ranks = run_directory, run, ranks
        self._followed: dict[int, RankFigures] = {}
        self._metrics: dict[str, Metric] = {}
        self._gpus = GpuUsage()

    def describe(self) -> Iterable[Family]:
        """Nothing: which metrics there are follows from the events."""
        return []

    def collect(self) -> Iterator[Family]:
        """All metrics of the host's ranks, then the host's own."""
        families: dict[str, Family] = {}
        for rank in self._present():
            figures = self._followed.setdefault(rank, RankFigures(self._directory, rank, self._metrics))
            figures.read()
            for metric, value in figures.values():
                self._add(families, metric, value, (("rank", str(rank)),))
        for metric, value in (*self._checkpoint(), *host_usage(self._directory), *self._gpus.figures()):
            self._add(families, metric, value, ())
        yield from families.values()

    def _add(
        self, families: dict[str, Family], metric: Metric, value: float, place: tuple[tuple[str, str], ...]
    ) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = dict((("run", self._run), *place, *metric.labels))
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        text = _HELP.get(metric.name, metric.name.removeprefix("shoal_").replace("_", " "))
        family = families.setdefault(metric.name, kind(metric.name, text, labels=list(labels)))
        family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]

    def _present(self) -> list[int]:
        names = (_FILE.fullmatch(path.name) for path in self._directory.glob("events/rank-*.jsonl"))
        found = {int(name[1]) for name in names if name}
        return sorted(found if self._ranks is None else found & set(self._ranks))

    def _checkpoint(self) -> Iterator[tuple[Metric, float]]:
        steps = [
            path.parent.name.removeprefix("step-") for path in self._directory.glob("checkpoints/step-*/manifest.json")
        ]
        newest = max((int(step) for step in steps if step.isdigit()), default=None)
        if newest is not None:
            yield Metric("shoal_checkpoint_step", "gauge"), float(newest)


class RankFigures:
    """One rank's events, taken in line by line: newest values, and sums of what is counted, by the measurement's name.

    `metrics` are those of names seen before, on any rank. The endpoint of a run that goes on reads all lines of its
    earlier starts at the first scrape, so a line costs two look-ups a value.
    """

    def __init__(self, run_directory: Path, rank: int, metrics: dict[str, Metric]) -> None:
        self._metrics = metrics
        self._tail = Tail(run_directory / "events" / f"rank-{rank:05d}.jsonl")
        self._decode = msgspec.json.Decoder(Event).decode
        self._event: Event | None = None
        self._newest: dict[str, float | None] = {}
        self._sums: dict[str, float] = {}
        self._steps = self._nonfinite = self._restarts = 0

    def read(self) -> None:
        """Takes in the lines that are new; damaged ones count in nothing."""
        for line in self._tail.lines():
            try:
                self._take(self._decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue

    def values(self) -> Iterator[tuple[Metric, float]]:
        """Every metric and its value."""
        if self._event is None:
            return
        yield Metric("shoal_step", "gauge"), self._event.step
        yield Metric("shoal_last_step_timestamp_seconds", "gauge"), self._event.time_s
        yield Metric("shoal_generation", "gauge"), self._event.generation
        yield Metric("shoal_restarts", "counter"), self._restarts
        if self._steps:
            yield Metric("shoal_steps_recorded", "counter"), self._steps
            yield Metric("shoal_steps_nonfinite", "counter"), self._nonfinite
        for name, value in self._newest.items():
            if self._metrics[name].kind == "gauge":
                yield self._metrics[name], math.nan if value is None else value
        for name, total in self._sums.items():
            yield self._metrics[name], total

    def _take(self, event: Event) -> None:
        self._restarts += not event.values  # as the writer says that a run goes on
        self._event, values = event, event.values
        self._newest.update(values)
        for name, value in values.items():
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = metric_of(name)
            if metric.kind == "counter" and value is not None and math.isfinite(value):
                self._sums[name] = self._sums.get(name, 0.0) + value
        if "time/step" in values:
            self._steps += 1
            self._nonfinite += any(not math.isfinite(event.get(name) or 0.0) for name in ("loss/train", "grad/norm"))
