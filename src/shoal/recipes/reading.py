"""Reading a run file, and the rules between its tables: what each table by itself cannot know.

Imports no torch, so that a run that cannot be is refused before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.config.load import load
from shoal.data.config import StdlibText, TextFiles
from shoal.errors import ConfigError
from shoal.models.config import GPTConfig
from shoal.recipes.rules.layout import layout_refusal
from shoal.recipes.rules.noise import noise_refusal
from shoal.recipes.rules.sync import sync_refusal
from shoal.recipes.run_file import RunFile, statistics_group


def load_run(path: Path, overrides: Iterable[str] = ()) -> RunFile:
    """The run file with its overrides, checked table by table and across tables. Raises `ConfigError`."""
    run_file = load(RunFile, path, overrides)
    check_across(run_file, file=str(path))
    return run_file


def check_across(run_file: RunFile, *, file: str) -> None:
    """The rules between tables. Raises `ConfigError` for the first that is broken."""
    sentence = refusal(run_file)
    if sentence is not None:
        raise ConfigError(f"{file}: {sentence}")


def refusal(run_file: RunFile) -> str | None:
    """The first rule between the tables that is broken, as a sentence; None where all hold."""
    for rule in (_batch_rule, _groups_rule, _vocabulary_rule, layout_refusal, noise_refusal, sync_refusal):
        sentence = rule(run_file)
        if sentence is not None:
            return sentence
    return None


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
