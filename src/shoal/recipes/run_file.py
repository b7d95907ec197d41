"""The run file's root: every table, and the rules between tables.

Reading it imports no torch, so that a wrong key is refused at once and the launcher starts at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shoal.checkpoint.config import CheckpointConfig
from shoal.config.load import load
from shoal.config.table import Table, says
from shoal.data.config import BatchConfig, DataConfig, StdlibText, TextFiles
from shoal.engine.config import CrossEntropy, Float32, LossConfig, PrecisionConfig
from shoal.errors import ConfigError
from shoal.memory.config import MemoryConfig
from shoal.models.config import GPTConfig, ModelConfig
from shoal.observe.config import ObserveConfig
from shoal.optim.config import AdamW, OptimizerConfig, Schedule
from shoal.parallel.config import ContextConfig, PipelineConfig
from shoal.recipes.layout_rules import layout_refusal
from shoal.sync.config import AllReduce, SyncConfig
from shoal.topology.config import LayoutConfig


class RunConfig(Table, frozen=True):
    """What the run is called, how long it is, and where it runs."""

    name: Annotated[
        str,
        says("Name of the run; its folder is `runs/<name>`.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128),
    ]
    steps: Annotated[int, says("Optimizer steps in the whole run.", ge=1, le=10**9)]
    seed: Annotated[int, says("Parameters, order of the data and dropout follow from it.", ge=0, le=2**63 - 1)] = 0
    processes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None,
        says("Ranks; default: the layout's product, else one per GPU, else two."),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], says("Where the ranks compute; auto: GPUs where there are any.")
    ] = "auto"
    directory: Annotated[str | None, says("The run's folder; default `runs/<name>`.")] = None
    compile: Annotated[bool, says("Compile the model with `torch.compile`.")] = False
    warm_start: Annotated[str | None, says("A run directory or checkpoint whose weights alone start this run.")] = None
    nonfinite_limit: Annotated[
        int, says("Non-finite steps in a row, each skipped, after which the run stops with exit 4.", ge=1)
    ] = 5
    timeout_s: Annotated[float, says("Longest wait for the other ranks in one collective.", gt=0, le=86400)] = 60.0


class RunFile(Table, frozen=True):
    """One run, whole."""

    run: RunConfig
    model: Annotated[ModelConfig, says("The model.")]
    data: Annotated[DataConfig, says("The data.")]
    batch: BatchConfig
    loss: LossConfig = CrossEntropy()
    optimizer: OptimizerConfig = AdamW()
    schedule: Schedule = Schedule()
    precision: PrecisionConfig = Float32()
    layout: LayoutConfig = LayoutConfig()
    pipeline: PipelineConfig = PipelineConfig()
    context: ContextConfig = ContextConfig()
    sync: SyncConfig = AllReduce()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()


def load_run(path: Path, overrides: Iterable[str] = ()) -> RunFile:
    """The run file with its overrides, checked table by table and across tables. Raises `ConfigError`."""
    run_file = load(RunFile, path, overrides)
    check_across(run_file, file=str(path))
    return run_file


def run_directory(run_file: RunFile) -> Path:
    """The folder of the run, relative to where `shoal` was called unless given absolute."""
    return Path(run_file.run.directory or f"runs/{run_file.run.name}")


def check_across(run_file: RunFile, *, file: str) -> None:
    """The rules between tables. Raises `ConfigError` for the first that is broken."""
    for rule in (_batch_rule, _groups_rule, _vocabulary_rule, layout_refusal):
        sentence = rule(run_file)
        if sentence is not None:
            raise ConfigError(f"{file}: {sentence}")


def _batch_rule(run_file: RunFile) -> str | None:
    layout, samples = run_file.layout, run_file.batch.global_samples
    processes = run_file.run.processes or layout.default_processes or 1
    shares = processes // (layout.pipeline * layout.context * layout.tensor)
    fewest = shares * statistics_group(run_file)
    if samples < fewest:
        what = f"{shares} replicas" if layout.shard == 1 else f"{shares} shares (replicate x shard)"
        return (
            f"batch.global_samples = {samples} for {what}: each needs at least "
            f"{statistics_group(run_file)} of a step; raise it to {fewest} or more, or use fewer processes"
        )
    return None


def _groups_rule(run_file: RunFile) -> str | None:
    group = statistics_group(run_file)
    for name, value in (
        ("global_samples", run_file.batch.global_samples),
        ("micro_samples", run_file.batch.micro_samples),
    ):
        if value is not None and value % group:
            down = max(group, value - value % group)
            return (
                f'batch.{name} = {value}: model.norm = "batch" takes statistics over groups of {group} samples, so it '
                f"must be a multiple of {group}; nearest: {down} or {value - value % group + group}"
            )
    return None


def _vocabulary_rule(run_file: RunFile) -> str | None:
    model, reads_bytes = run_file.model, isinstance(run_file.data, StdlibText | TextFiles)
    if reads_bytes and isinstance(model, GPTConfig) and model.vocabulary < 256:
        return f"model.vocabulary = {model.vocabulary}: text is read as bytes, so it must be at least 256"
    return None


def statistics_group(run_file: RunFile) -> int:
    """Samples whose batch statistics are taken together; 1 where the model has none."""
    grouped = getattr(run_file.model, "norm", None) == "batch"
    return getattr(run_file.model, "group_samples", 1) if grouped else 1


def with_processes(run_file: RunFile, processes: int) -> RunFile:
    """The same run on a known number of ranks."""
    return msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=processes))
