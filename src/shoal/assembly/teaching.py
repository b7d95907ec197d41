"""The teacher of `[distillation]`: the model of a finished run, on this rank."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from shoal.assembly.objects import UserObjects, model_of
from shoal.checkpoint.inspect import copy_weights, require_weights_of, weights_of
from shoal.checkpoint.verify import checkpoint_in, run_directory_of
from shoal.engine.distillation import Distillation
from shoal.errors import ConfigError
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile


def distillation_of(run_file: RunFile, *, device: torch.device, dtype: torch.dtype) -> Distillation | None:
    """None without `[distillation]`. Raises `ConfigError` or `UsageError` for a teacher that is not there."""
    config = run_file.distillation
    if config is None:
        return None
    source = Path(config.teacher)
    written = run_directory_of(checkpoint_in(source)) / "run.toml"
    if not written.exists():
        raise ConfigError(
            f"distillation.teacher = {json.dumps(config.teacher)} has no run.toml, which says what model it is: name a "
            "run directory, or a checkpoint in one"
        )
    teacher, weights = model_of(load_run(written), UserObjects(), device=device, dtype=dtype), weights_of(source)
    require_weights_of(teacher, weights, source=source)
    copy_weights(weights, teacher)
    return Distillation(config, teacher.eval().requires_grad_(False))
