"""The sinks of a run: the one list of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from shoal.observe.config import ObserveConfig
from shoal.observe.displays import display_on
from shoal.observe.events import EventSink
from shoal.observe.logs import LogSink
from shoal.observe.mlflow import mlflow_sink
from shoal.observe.prometheus import PrometheusSink
from shoal.observe.report import ReportSink
from shoal.observe.sink import Sinks
from shoal.observe.tensorboard import tensorboard_sink
from shoal.observe.wandb import wandb_sink
from shoal.observe.webhook import WebhookSink


def open_sinks(
    config: ObserveConfig,
    run_directory: Path,
    *,
    rank: int,
    stream: TextIO,
    reports_failure: bool = True,
    host_ranks: Sequence[int] | None = None,
) -> Sinks:
    """The sinks of one rank. Every rank has its log and its events; rank 0 also the display on `stream`, the report,
    and what goes to TensorBoard, MLflow and Weights & Biases; each host's first rank has the endpoint for Prometheus.

    `reports_failure`: rank 0 writes the report of a failed run, too; False where a launcher does, which knows better
    which rank was the cause. `host_ranks`: the ranks of this host; None: all, and rank 0 is the first. Raises
    `EnvironmentFault` where the log cannot be opened, `MissingExtra` where a package is missing.
    """
    sinks = Sinks(LogSink(run_directory, rank=rank))
    if rank == 0:
        sinks.add(display_on(stream, live=None if config.live else False, run_directory=run_directory))
    sinks.add(EventSink(run_directory, rank=rank, warn=sinks.warn))
    if config.prometheus_port is not None and rank == (min(host_ranks) if host_ranks else 0):
        address = (config.prometheus_host, config.prometheus_port)
        sinks.add(PrometheusSink(run_directory, address, ranks=host_ranks, note=sinks.note, warn=sinks.warn))
    if rank == 0 and config.tensorboard:
        sinks.add(tensorboard_sink(run_directory, warn=sinks.warn))
    if rank == 0 and config.mlflow is not None:
        sinks.add(mlflow_sink(config.mlflow, run_directory, warn=sinks.warn))
    if rank == 0 and config.wandb != "off":
        sinks.add(wandb_sink(run_directory, mode=config.wandb, warn=sinks.warn))
    if rank == 0 and config.webhook is not None:
        name = run_directory.name
        sinks.add(WebhookSink(config.webhook, name=name, failures=reports_failure, note=sinks.note))
    if rank == 0:
        sinks.add(
            ReportSink(
                run_directory, page=config.report, failures=reports_failure, note=sinks.note, activity=sinks.activity
            )
        )
    return sinks
