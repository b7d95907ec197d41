"""What was measured of this machine: `calibration.toml` in the cache folder, and the runs whose steps it predicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shoal.comm.config import Capabilities, WireConfig, choose_backend
from shoal.config.check import checked
from shoal.config.load import dumps, read
from shoal.engine.config import Float32
from shoal.files import cache_folder
from shoal.launcher.devices import cores
from shoal.models.config import GPTConfig, MoEConfig
from shoal.planner.predict.measured import Measured, measured_of
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import Calibration


def calibration_path(environ: Mapping[str, str]) -> Path:
    """`calibration.toml` in `SHOAL_CACHE`, else in ~/.cache/shoal."""
    return cache_folder(environ) / "calibration.toml"


def read_calibration(path: Path) -> Calibration | None:
    """What is known of this machine; None before anything was measured. Raises `ConfigError` for a damaged file."""
    return checked(read(path), Calibration, file=str(path)) if path.exists() else None


def add_calibration(path: Path, newer: Calibration) -> Calibration:
    """Joins `newer` with what the file holds, where it is of the same machine and PyTorch; what is written then."""
    older = read_calibration(path)
    same = older is not None and (older.machine, older.torch) == (newer.machine, newer.torch)
    whole = older.joined(newer) if older is not None and same else newer
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(dumps(whole), encoding="utf-8")
    part.replace(path)
    return whole


UNCOVERED = "no prediction: covered are dense GPTs in float32 on CPU ranks of one thread, on one host"
HOW = "no prediction: this machine is not calibrated; 'shoal bench products' measures it in about a minute"
SWEPT = ("shm", "gloo")
"""Backends whose collectives `shoal bench products` measures beside the operators."""


def calibration_here(environ: Mapping[str, str]) -> Calibration | None:
    """What was measured on this machine; None before anything was. Raises `ConfigError` for a damaged file."""
    return read_calibration(calibration_path(environ))


def measured_here(run_file: RunFile, calibration: Calibration | None) -> Measured | None:
    """What predicts this run's steps on this machine's cores.

    None where nothing was measured, for transports that were not, and for what the sweep of operators does not cover:
    mixtures, other precisions than float32, compiled models. `unpredicted` says which.

    Raises:
        ConfigError: the calibration has holes.
    """
    if calibration is None or unpredicted(run_file, calibration) is not None:
        return None
    return _measured(run_file.wire, calibration)


def measured_for_traces(run_file: RunFile, calibration: Calibration | None) -> Measured | None:
    """What prices the traced operators of a model that is none of this project's, by those of the sweep.

    None where nothing was measured, for transports that were not, for other precisions than float32 and for compiled
    models. Raises `ConfigError` where the calibration has holes.
    """
    if calibration is None or not isinstance(run_file.precision, Float32) or run_file.run.compile:
        return None
    measured = _is_measured(calibration, _backend(run_file.wire))
    return _measured(run_file.wire, calibration) if measured and calibration.operators else None


def _measured(wire: WireConfig, calibration: Calibration) -> Measured:
    found = measured_of(calibration, cores=cores(), dtype="float32", backend=_backend(wire))
    return found.calibrated(calibration.step_factor or 1.0)


def unpredicted(run_file: RunFile, calibration: Calibration | None) -> str | None:
    """Why this run's steps are not predicted on this machine, and what would help; None where they are."""
    if not covered(run_file):
        return UNCOVERED
    backend = _backend(run_file.wire)
    unmeasured = calibration is None or not _is_measured(calibration, backend)
    verb = "'shoal bench comm'" if backend in SWEPT else f"'shoal bench comm --backends {backend}'"
    if calibration is None or not calibration.operators:
        return HOW if not unmeasured or backend in SWEPT else f"{HOW}, and {verb} its collectives over {backend}"
    if unmeasured:
        return f"no prediction: collectives over {backend} were not measured on this machine; {verb} measures them"
    return None


def _is_measured(calibration: Calibration, backend: str) -> bool:
    """Whether the ranks of one host were measured over `backend`, in float32."""
    return any((fit.backend, fit.hosts, fit.dtype) == (backend, 1, "float32") for fit in calibration.collectives)


def _backend(wire: WireConfig) -> str:
    """Over which the run's ranks talk on one host."""
    return choose_backend(wire.transport, Capabilities("cpu", hosts=("here", "here"))).backend


def covered(run_file: RunFile) -> bool:
    """Whether the sweep has the operators of this run: a dense GPT in float32, uncompiled."""
    model = run_file.model
    dense = isinstance(model, GPTConfig) and not isinstance(model, MoEConfig) and not model.dropout
    return dense and isinstance(run_file.precision, Float32) and not run_file.run.compile
