"""The endpoint says what the events say, and the Grafana dashboard asks for what the endpoint has."""

from __future__ import annotations

import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.observe.events import EventWriter
from shoal.observe.host_usage import GpuUsage
from shoal.observe.prometheus import PrometheusSink
from shoal.observe.sink import Ending, RunStart
from tests.observe.test_gpu_usage import library
from tests.page.runs import START_S, loss, values, write_run
from tests.services.prometheus import prometheus, why_not
from tests.waiting import HANG_S, wait_until

pytest.importorskip("prometheus_client", reason="pip install 'shoal[prometheus]'")
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(shoal.__file__).parents[2] / "docs/grafana/shoal.json"


@contextmanager
def endpoint(directory: Path, **options: Any) -> Iterator[tuple[str, list[str]]]:
    """The address of the metrics of a run, and the warnings."""
    notes: list[str] = []
    warnings: list[str] = []
    address = ("127.0.0.1", options.pop("port", 0))
    sink = PrometheusSink(directory, address, ranks=None, note=notes.append, warn=warnings.append, **options)
    sink.start(RunStart(name="tiny", total_steps=60))
    try:
        yield (notes[0].split(": ", 1)[1] if notes else ""), warnings
    finally:
        sink.finish(Ending("finished"))


def scraped(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The value of every sample, by its name and labels without the run's."""
    with urllib.request.urlopen(address, timeout=HANG_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(item for item in sample.labels.items() if item[0] != "run"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_endpoint_says_what_the_events_say(tmp_path: Path) -> None:
    """Newest values as gauges, sums of all steps as counters, for every rank; the next scrape has the next step."""
    write_run(tmp_path, ranks=3, steps=40, nan_at=7)
    with endpoint(tmp_path) as (address, _):
        found = scraped(address)
        for rank in "012":
            assert found["shoal_step", (("rank", rank),)] == 40
            assert found["shoal_loss_train", (("rank", rank),)] == pytest.approx(loss(40), rel=1e-12)
            assert found["shoal_wire_sent_bytes_total", (("rank", rank),)] == pytest.approx(40 * 3.65e6)
            assert found["shoal_steps_nonfinite_total", (("rank", rank),)] == 1
            labels = (("collective", "all_reduce"), ("rank", rank))
            assert found["shoal_collective_exposed_seconds_total", labels] == pytest.approx(40 * 0.02)
        assert found["shoal_moe_load_tokens", (("expert", "2"), ("mixture", "blocks.1.moe"), ("rank", "0"))] == 96
        assert found["shoal_host_memory_bytes", ()] > 2**20
        with EventWriter(tmp_path, rank=1) as writer:
            writer.write(41, values(41, 1, 99, None), time_s=START_S)
        found = scraped(address)
        assert found["shoal_step", (("rank", "1"),)] == 41
        assert found["shoal_wire_sent_bytes_total", (("rank", "1"),)] == pytest.approx(41 * 3.65e6)


def test_a_port_that_is_taken_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    """Nothing is raised, and the sentence names the key to change."""
    write_run(tmp_path, steps=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with endpoint(tmp_path, port=taken.getsockname()[1]) as (_, warnings):
            assert len(warnings) == 1
            assert "another observe.prometheus_port helps the next start" in warnings[0]


def with_all_figures(directory: Path) -> None:
    """A run of two hosts, with a checkpoint and what is measured on request."""
    write_run(directory, steps=20, ranks=2)
    with EventWriter(directory, rank=0) as writer:
        writer.write(21, {"wire/between_bytes": 1.0, "wire/inside_bytes": 1.0}, time_s=START_S + 9)
        saved = {"checkpoint/interval_steps": 20.0, "checkpoint/interval_s": 2.0}
        on_request = {"grad/norm/blocks.0": 1.0, "scaling/speed_up": 3.0, "scaling/efficiency": 0.75}
        writer.write(22, saved | on_request, time_s=START_S + 9)
    (directory / "checkpoints/step-00000020").mkdir(parents=True)
    (directory / "checkpoints/step-00000020/manifest.json").write_text("{}")


def queries() -> list[str]:
    """All of the dashboard's, of any run."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    return [target["expr"].replace("$run", ".*") for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    """Every name in every query of the dashboard is one that the endpoint of a run exposes, with the labels it uses."""
    with_all_figures(tmp_path)
    with endpoint(tmp_path) as (address, _):
        found = scraped(address)
    assert found["shoal_grad_norm_layer", (("layer", "blocks.0"), ("rank", "0"))] == 1
    assert found["shoal_checkpoint_interval_steps", (("rank", "0"),)] == 20
    assert found["shoal_checkpoint_interval_seconds", (("rank", "0"),)] == 2
    exposed = {name for name, _ in found} | {metric.name for metric, _ in GpuUsage(library(tmp_path, init=0)).figures()}
    asked = {name for query in queries() for name in re.findall(r"shoal_[a-z_]+", query)}
    assert len(asked) > 20
    assert asked <= exposed


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_real_prometheus_scrapes_it_and_answers_the_dashboard(tmp_path: Path) -> None:
    """Debian's Prometheus takes every sample in, and has an answer to each query of the dashboard; of a GPU, if there
    is one here. What is counted has a rate: the next steps are in it."""
    with_all_figures(tmp_path / "run")
    with (
        endpoint(tmp_path / "run") as (address, _),
        prometheus(tmp_path / "server", urllib.parse.urlsplit(address).netloc) as server,
    ):
        server.wait_for_scrapes(2)
        assert [one["value"][1] for one in server.ask('shoal_step{rank="1"}')] == ["20"]
        unanswered = [query for query in queries() if not server.ask(query)]
        assert [query for query in unanswered if "_gpu_" not in query] == []
        assert server.ask("shoal_no_such_metric") == []
        with EventWriter(tmp_path / "run", rank=1) as writer:
            writer.write(21, values(21, 1, 99, None), time_s=START_S)
        wait_until(lambda: server.ask('rate(shoal_wire_sent_bytes_total{rank="1"}[1m]) > 0'))
