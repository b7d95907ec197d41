"""A run file and a cluster -> what is planned, with which stack, and the whole answer of `shoal plan`."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal import units
from shoal.cost.footprint import Footprint, Overheads
from shoal.errors import ConfigError, LayoutError, UsageError
from shoal.launcher.devices import cores
from shoal.models.config import GPTConfig, attention_mask_of
from shoal.planner.explain.codecs import Codings, codec_changes, codings
from shoal.planner.explain.explain import condition, helps
from shoal.planner.explain.explain import why_not as explain_why_not
from shoal.planner.explain.residuals import Evidence
from shoal.planner.explain.text import Change
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.predictor import Prediction, Predictor, Workload
from shoal.planner.predict.run_cost import run_cost
from shoal.planner.predict.workload import Constants
from shoal.planner.search.search import Found
from shoal.planner.trace.predictor import TracedPredictor
from shoal.planning.calibration import calibration_here, measured_for_traces, measured_here
from shoal.planning.history import remembered, track_record
from shoal.planning.measured_step import MeasuredStep, calibrated, step_of_earlier_run
from shoal.planning.plan_file import allowed_by, with_codec, written_plan
from shoal.planning.stack import optimizer_changes, search_with, stack_of, transformer_of
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import CodecTime
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import cluster_from, load_cluster

DATA_SHEET: Evidence = "data sheet"
MEASURED = Constants(dispatch_s=0.0, kernel_s=0.0, optimizer_start_s=0.0)
"""Measured operators hold what the host and the shortest kernel take."""


def workload_of(run_file: RunFile, *, expert_imbalance: float = 1.0) -> Workload:
    """The model and the step. Raises `ConfigError` for a model whose sizes the run file does not tell."""
    return Workload(
        model=transformer_of(run_file.model, expert_imbalance=expert_imbalance),
        global_samples=run_file.batch.global_samples,
        sequence=run_file.batch.sequence,
    )


def cluster_file(named: str | None, given: Path | None) -> Path | None:
    """The file of the machine that a question is about: the one given with it, else `named`, the run file's
    `layout.cluster`, else none.
    """
    return given or (None if named is None else Path(named))


def cluster_of(run_file: RunFile, path: Path | None) -> Cluster:
    """The cluster of a file; without one, CPU cores of one machine, as many as the run has processes."""
    if path is not None:
        return load_cluster(path)
    if run_file.run.device == "cuda":
        raise ConfigError('run.device = "cuda": say which machine with --cluster C.toml, such as machine = "dgx-h100"')
    processes = run_file.stated_processes or 2
    name = f"this machine's {cores()} cores" if processes <= cores() else f"ranks that share {cores()} cores"
    table = {"nodes": 1, "machine": "cpu-2", "name": name, "devices_per_node": processes}
    return cluster_from({"cluster": table}, file="this machine")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """All that `shoal plan` shows. `written` is the run file's own plan, None where the cluster cannot hold it."""

    predictor: Predictor
    found: Found
    written: Prediction | None
    changes: list[Change]
    codings: Codings | None
    why_not: str | None
    untraced: str | None
    money: dict[str, float | None]
    basis: str
    evidence: Evidence
    track_record: str | None


def planned(
    run_file: RunFile,
    cluster: Path | None,
    *,
    keep: int,
    why_not: str | None = None,
    measured_step: MeasuredStep | None = None,
    expert_imbalance: float | None = None,
) -> Planned:
    """The search and its explanation. `expert_imbalance` is what the fullest expert of a mixture gets over the mean;
    default: as in the run of the measured step, else even.

    Raises `ConfigError`, `LayoutError` (nothing fits), `UsageError`."""
    allowed = allowed_by(run_file)
    if why_not is not None:
        condition(why_not, allowed)  # refused before the search, which may take minutes
    if expert_imbalance is None:
        expert_imbalance = 1.0 if measured_step is None else measured_step.expert_imbalance
    predictor, evidence = predictor_of(run_file, cluster, expert_imbalance=expert_imbalance), DATA_SHEET
    basis = basis_of(predictor, stated=cluster is not None) + _imbalance_text(predictor)
    if measured_step is not None:
        predictor, evidence, how = _calibrated(predictor, cluster, measured_step)
        basis = how if measured_step.tried and evidence != DATA_SHEET else basis + how
    basis += _partly_trained_text(run_file)
    found = search_with(run_file, predictor, allowed, keep=keep)
    best = found.best[0]
    written = _written(run_file, predictor)
    codec_serves = with_codec(run_file)
    changes = [*helps(predictor, best), *codec_changes(predictor, best, codec_serves)]
    changes += optimizer_changes(run_file, predictor, best)
    return Planned(
        predictor=predictor,
        found=found,
        written=written,
        changes=sorted(changes, key=lambda change: change.step_s),
        codings=codings(predictor, written or best, codec_serves),
        why_not=explain_why_not(predictor, why_not, best, allowed=allowed) if why_not else None,
        untraced=_untraced(predictor),
        money=asdict(run_cost(predictor, best, steps=run_file.run.steps)),
        basis=basis,
        evidence=evidence,
        track_record=_track_record(predictor),
    )


def best_plans(run_file: RunFile, cluster: Path | None, *, keep: int) -> list[dict[str, Any]]:
    """The `keep` fastest plans that fit, as `shoal plan --json` has them; `cluster` as in `cluster_file`."""
    where = cluster_file(run_file.layout.cluster, cluster)
    step = step_of_earlier_run(run_file, host=socket.gethostname()) if where is None else None
    return [one.record() for one in planned(run_file, where, keep=keep, measured_step=step).found.best]


def _calibrated(predictor: Predictor, cluster: Path | None, step: MeasuredStep) -> tuple[Predictor, Evidence, str]:
    """And how, for people. A step that was asked for must fit; one that was found in a run directory may not."""
    took = units.seconds(step.step_s)
    try:
        of = predictor_of(step.run_file, step.cluster or cluster, expert_imbalance=step.expert_imbalance)
        found, evidence = calibrated(predictor, of, step)
    except (UsageError, LayoutError) as why:
        if step.tried:
            return (
                predictor,
                DATA_SHEET,
                f"; not calibrated on the {took} that a step took here on one rank, as no rate explains it",
            )
        if step.directory is None:
            raise
        return predictor, DATA_SHEET, f"; not calibrated on the {took} a step that {step.directory} took: {why}"
    if step.tried:
        samples = units.plural(step.run_file.batch.global_samples, "sample")
        return (
            found,
            evidence,
            f"{took} for {samples} of this model on one rank, measured just now; 'shoal bench products' measures more",
        )
    if step.directory is None:
        return found, evidence, f", calibrated on a measured step of {took}"
    return found, evidence, f", calibrated on the {took} a step that {step.directory} took here"


def _untraced(predictor: Predictor) -> str | None:
    """Which layouts are missing because the model that was split for them could not be traced, and why."""
    failures = predictor.job.subject.failures if isinstance(predictor, TracedPredictor) else {}
    if not failures:
        return None
    return f"Left out: layout.tensor = {' and '.join(map(str, failures))}, as {next(iter(failures.values()))}"


def _imbalance_text(predictor: Predictor) -> str:
    imbalance = predictor.workload.model.expert_imbalance if predictor.simulates else 1.0
    return "" if imbalance == 1.0 else f", the fullest expert with {imbalance:.3g} times the mean of its layer"


def _partly_trained_text(run_file: RunFile) -> str:
    """What prices do not know of: they are those of the whole model, trained with attention to all tokens."""
    tables = {"adapter": run_file.adapter, "freeze": run_file.freeze}
    masks = "" if run_file.sparsity is None else "; [sparsity] counts in memory, its products as dense ones"
    given = [f"[{name}]" for name, table in tables.items() if table is not None]
    given += ["[model.attention]"] if attention_mask_of(run_file.model) is not None else []
    return masks + (f"; as if without {' and '.join(given)}, which saves some of it" if given else "")


def _track_record(predictor: Predictor) -> str | None:
    """How far predictions were off here so far; runs of traced models are not predicted."""
    known = predictor.measured is not None and predictor.simulates
    return track_record(remembered(os.environ)) if known else None


def predictor_of(run_file: RunFile, cluster: Path | None, *, expert_imbalance: float = 1.0) -> Predictor:
    """What prices plans of this run file on the cluster of a file. Raises `ConfigError`."""
    where = cluster_of(run_file, cluster)
    on_cores = where.machine.scale_up.kind == "memory"
    here, known = cluster is None and on_cores, calibration_here(os.environ) if on_cores else None
    calibration = known if here else None
    traced = not isinstance(run_file.model, GPTConfig)
    measured = (measured_for_traces if traced else measured_here)(run_file, calibration)
    if here and measured is None:
        where = _shared(where)
    times = () if known is None else known.codecs
    return predictor_on(run_file, where, measured=measured, times=times, expert_imbalance=expert_imbalance)


def _shared(cluster: Cluster) -> Cluster:
    """`cluster`, its ranks at their share of a core where they outnumber this machine's."""
    share = min(1.0, cores() / cluster.devices)
    device = cluster.machine.device
    slower = msgspec.structs.replace(
        device, peak_tflops={dtype: rate * share for dtype, rate in device.peak_tflops.items()}
    )
    return msgspec.structs.replace(cluster, machine=msgspec.structs.replace(cluster.machine, device=slower))


def basis_of(predictor: Predictor, *, stated: bool) -> str:
    """What the predictions stand on; `stated`: a cluster file says what the machine is."""
    if predictor.measured is not None:
        traced = "" if predictor.simulates else "; the model's own by the nearest of them"
        return f"operators and collectives as measured on this machine{traced}"
    if stated:
        return "the rates of the cluster file"
    if predictor.cluster.machine.scale_up.kind == "memory":
        return (
            "assumed rates of CPU cores ('shoal bench products' measures this machine's, for dense GPTs in float32 "
            "over shared memory or Gloo)"
        )
    return "data sheets and published measurements"


def predictor_on(
    run_file: RunFile,
    where: Cluster,
    *,
    measured: Measured | None = None,
    times: tuple[CodecTime, ...] = (),
    expert_imbalance: float = 1.0,
) -> Predictor:
    """What prices plans of this run file on a cluster; `measured` where it is of this machine, `times` of codecs where
    they are of such devices. Raises `ConfigError`."""
    stack = stack_of(run_file, where, times=times)
    constants = None if measured is None else MEASURED
    try:
        if not isinstance(run_file.model, GPTConfig):
            if stack.float8 != "none":
                raise ConfigError(
                    'precision.kind = "float8": only the layers of gpt and moe are priced in it; plan with "bfloat16" '
                    "for an upper bound of the step"
                )
            from shoal.planning.tracing import traced_predictor  # imports torch, and the user's own code

            return traced_predictor(
                run_file, where, stack=stack, overheads=_overheads(where), constants=constants, measured=measured
            )
        return Predictor(
            workload_of(run_file, expert_imbalance=expert_imbalance),
            where,
            stack=stack,
            constants=constants,
            overheads=_overheads(where),
            measured=measured,
        )
    except ValueError as error:
        raise ConfigError(f"precision: {error}; choose another precision.kind, or add the rate to the device") from None


def tensor_bytes(one: Footprint) -> float:
    """What PyTorch's allocator gives out: all but libraries and slack."""
    return one.total - one.workspace - one.slack


def _overheads(cluster: Cluster) -> Overheads:
    """A CPU rank has no device context; PyTorch itself takes about 0.3 GiB."""
    on_cpu = cluster.machine.scale_up.kind == "memory"
    return Overheads(workspace_bytes=0.3 * 2**30) if on_cpu else Overheads()


def _written(run_file: RunFile, predictor: Predictor) -> Prediction | None:
    try:
        return predictor.predict(written_plan(run_file, predictor.cluster))
    except LayoutError:
        return None
