"""What a script's own loop cannot be: layouts, strategies and models that take the loop's work from it."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.engine.config import Float16
from shoal.errors import ConfigError
from shoal.models.embedding_table import tables_in
from shoal.own_loop.objects import is_compiled
from shoal.runfile.run_file import RunFile
from shoal.sync.config import ServerConfig


def require_own_loop(run_file: RunFile, *, model: Any, optimizer: Any) -> None:
    """Raises `ConfigError` for what a script's own loop, with this model and optimizer or several, cannot have."""
    _check_layout(run_file)
    _check_servers(run_file, model)
    _check_optimizers(run_file, optimizer)
    _check_compiled(run_file, model)


def _check_optimizers(run_file: RunFile, optimizer: Any) -> None:
    """Raises `ConfigError` for a precision that several optimizers cannot share."""
    if isinstance(run_file.precision, Float16) and isinstance(optimizer, list | tuple) and len(optimizer) > 1:
        raise ConfigError(
            f'precision.kind = "float16" with {len(optimizer)} optimizers: one loss scale would follow from all of '
            'them; use "bfloat16", or one optimizer'
        )


def _check_compiled(run_file: RunFile, model: Any) -> None:
    """Raises `ConfigError` where a compiled program would come upon collectives."""
    if is_compiled(model) and run_file.layout.shard != 1 and run_file.memory.zero == 3:
        raise ConfigError(
            "the model is compiled, and under memory.zero = 3 its layers fetch their weights while they compute, which "
            "a compiled program cannot: hand over the plain module, or set memory.zero to 1 or 2"
        )


def _check_servers(run_file: RunFile, model: Any) -> None:
    """Raises `ConfigError` for what would leave a rank without batches, or the script without its weights."""
    if run_file.sync.serving_only:
        raise ConfigError(
            f"sync.servers = {run_file.sync.serving_only}: dedicated servers run no script; set it to 0, or let "
            "shoal.train run the loop"
        )
    if isinstance(run_file.sync, ServerConfig) and isinstance(model, nn.Module) and tables_in(model):
        raise ConfigError(
            "the model has an EmbeddingTable, which would live on servers alone, out of reach of the script: let "
            "shoal.train run the loop, or use nn.Embedding"
        )


def _check_layout(run_file: RunFile) -> None:
    """Raises `ConfigError` for what takes the loop's own work from it."""
    layout = run_file.layout
    if run_file.elastic is not None:
        raise ConfigError("[elastic] needs the loop of shoal.train: leave the table out, or call shoal.train")
    for axis in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, axis, 1) not in (1, None):
            raise ConfigError(
                f"layout.{axis} = {getattr(layout, axis)}: a script's own loop can be replicated and sharded "
                "(layout.replicate, layout.shard); for the other axes let shoal.train run the loop"
            )
    if run_file.memory.loss_chunks > 1:
        raise ConfigError(
            f"memory.loss_chunks = {run_file.memory.loss_chunks}: a script's own loop computes its loss itself; leave "
            "it out, or let shoal.train run the loop"
        )
    observe = run_file.observe
    if run_file.gradients.schedule == "priority" or observe.noise_every_steps or observe.layer_norms_every_steps:
        raise ConfigError(
            'gradients.schedule = "priority", observe.noise_every_steps and observe.layer_norms_every_steps need the '
            "loop of shoal.train; leave them out"
        )
