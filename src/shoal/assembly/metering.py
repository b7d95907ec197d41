"""What a run measures on request, beside what every step does: the gradient by layers, speed-up against one rank."""

from __future__ import annotations

import tomllib
from math import prod
from pathlib import Path

from shoal.assembly.run import Run
from shoal.config.load import dumps
from shoal.engine.layer_norms import LayerNorms
from shoal.observe.scaling import Scaling, one_rank_rate


def layer_norms(run: Run) -> LayerNorms | None:
    """Of what the ranks in lock-step sum; None unless the run file asks for it."""
    every, split = run.run_file.observe.layer_norms_every_steps, run.generation.parts.split
    if every == 0:
        return None
    sizes = {name: prod(shape) for name, shape in split.shapes.items() if name not in split.frozen}
    return LayerNorms(run.generation.gradients, run.step.lockstep, sizes, every=every, device=run.device)


def scaling(run: Run) -> Scaling | None:
    """Rank 0's comparison with the run that `observe.one_rank` names. Raises `UsageError` where it cannot be made."""
    source = run.run_file.observe.one_rank
    if source is None or run.mesh.rank != 0:
        return None
    model = tomllib.loads(dumps(run.run_file))["model"]
    return Scaling(one_rank_rate(Path(source), model), run.mesh.layout.world_size)
