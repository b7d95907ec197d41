"""`Workload`: what a run trains, on which data, towards which loss. It outlives every change of the membership."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from shoal.assembly.first_values import FirstValues, KeyedValues, built_by_parts, splits_model, why_whole
from shoal.assembly.objects import UserObjects, check_layout_independent, data_of, loss_of, model_of, skeleton_of
from shoal.assembly.own_split import check_steps_parts, prepare_split
from shoal.assembly.process import Process
from shoal.assembly.reading import check_reading, check_short_step, slow_reads
from shoal.assembly.sameness import require_same, require_same_code, require_same_length, samples_of, shapes_of
from shoal.checkpoint.commit import checkpoint_in, run_directory_of
from shoal.checkpoint.weights import copy_weights, require_weights_of, weights_of
from shoal.data.batches import SlowReads
from shoal.data.build import Dataset
from shoal.data.config import StdlibText, TextFiles, Tokens
from shoal.data.labelled import predicts_next_token, with_labels
from shoal.engine.loss import Distillation, Loss
from shoal.engine.precision import Precision, precision_of
from shoal.errors import ConfigError
from shoal.models.draw_watch import host_states
from shoal.models.huggingface.config import TransformersConfig
from shoal.models.huggingface.model import check_plans
from shoal.optim.adopt import OwnOptimizer, own_optimizers
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.topology.layout import Layout

# The teacher of `[distillation]`: the model of a finished run, on this rank.


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


@dataclass(frozen=True)
class Workload:
    """The unsplit model; data, loss and precision. `values`: of what has no storage in it; None: all is there. `whole`:
    why it is, where a rank needs only a part.

    `objects` are what a script passed, `optimizers` those among them; none: the run file's is built. `samples` are the
    lines of `sameness.samples_of`. `data_draws`: from which generators that it shares with the training the data draws.
    """

    model: nn.Module
    values: FirstValues | None
    data: Dataset
    loss: Loss
    precision: Precision
    objects: UserObjects
    optimizers: Sequence[OwnOptimizer] = ()
    samples: Sequence[str] = ()
    distillation: Distillation | None = None
    whole: str | None = None
    data_draws: Sequence[str] = ()

    @property
    def trained_with(self) -> list[object]:
        """The objects whose code decides what is trained."""
        return [*self.model.modules(), self.data.train, self.data.held_out, self.loss]

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.precision.parameters


def build_workload(
    run_file: RunFile, process: Process, objects: UserObjects, *, layout: Layout, micro_samples: int | None
) -> Workload:
    """Builds it on this rank, and compares it with rank 0's.

    Raises `UserCodeError` if the ranks built different models or data, or if the model takes statistics over whatever
    samples a rank happens to hold.
    """
    workload = load_workload(
        run_file, objects, device=process.device, environ=process.environ, layout=layout, micro_samples=micro_samples,
        by_parts=process.place.one_host,
    )  # fmt: skip
    require_same_code(process.place.rank, process.announce, workload.trained_with)
    slow = slow_reads(run_file.wire, rank=process.place.rank, ranks=process.place.world_size)
    if workload.data.iterable is not None:
        require_same_length(process.place.rank, process.first, workload.data.iterable)
    workload = with_samples(workload, run_file, slow)
    require_same(process.place.rank, process.announce, {"model": shapes_of(workload.model), "data": workload.samples})
    return workload


def with_samples(workload: Workload, run_file: RunFile, slow: SlowReads = SlowReads()) -> Workload:
    """The same, with what some of its samples are, and what reading them draws from."""
    before = host_states()
    samples = samples_of(workload.data, slow, first=run_file.batch.global_samples)
    shared = getattr(run_file.data, "reader_kind", "threads") == "threads"
    drawing = [name for name, state in host_states().items() if shared and state != before[name]]
    return replace(workload, samples=samples, data_draws=drawing)


def load_workload(
    run_file: RunFile,
    objects: UserObjects,
    *,
    device: torch.device,
    environ: Mapping[str, str],
    layout: Layout,
    micro_samples: int | None,
    by_parts: bool | None = None,
) -> Workload:
    """Builds it on this rank alone. Raises `UserCodeError`, as `build_workload` does for the model.

    `by_parts`: a user's model may come without storage, where the layout splits it; whether all ranks are on one host.
    None: it is whole.
    """
    precision = precision_of(run_file.precision)
    home = torch.device("cpu") if objects.optimizers and layout.tensor > 1 else device  # until it is cut
    model, values, why = _model(run_file, objects, device=home, layout=layout, by_parts=by_parts)
    shares = layout.replicate * layout.shard
    if objects.optimizers and layout.tensor > 1:
        prepare_split(model, layout)
    if isinstance(run_file.model, TransformersConfig) and objects.model is None:
        cut = isinstance(run_file.data, StdlibText | TextFiles | Tokens)
        sequence = run_file.batch.sequence if cut and objects.data is None else None
        check_plans(model, layout, sequence_parallel=run_file.layout.sequence_parallel, sequence=sequence)
    check_layout_independent(
        model, shares=shares, global_samples=run_file.batch.global_samples, micro_samples=micro_samples
    )
    loss, data = loss_of(run_file.loss, objects, precision), data_of(run_file, objects, environ)
    data = with_labels(data, next_token=predicts_next_token(model))
    check_reading(run_file, data)
    check_short_step(run_file, len(data.train), layout)
    optimizers = own_optimizers(objects.optimizers, model) if objects.optimizers else []
    if layout.tensor > 1:
        check_steps_parts(optimizers, layout)
    teacher = distillation_of(run_file, device=device, dtype=precision.parameters)
    return Workload(model, values, data, loss, precision, objects, optimizers, distillation=teacher, whole=why)


def _model(
    run_file: RunFile, objects: UserObjects, *, device: torch.device, layout: Layout, by_parts: bool | None
) -> tuple[nn.Module, FirstValues | None, str | None]:
    """The model, the values of what has no storage in it, and why it is whole where it need not be."""
    dtype, asked = precision_of(run_file.precision).parameters, run_file.memory.build
    skeleton, why = skeleton_of(run_file, objects), None
    if skeleton is not None:
        return skeleton, KeyedValues(run_file.run.seed), None
    given = isinstance(objects.model, nn.Module) and asked == "auto"  # it is whole, as its script wants it
    wanted = by_parts is not None and asked != "whole" and not given and not objects.optimizers
    if wanted and splits_model(run_file, layout):
        try:
            return *built_by_parts(run_file, objects, device=device, dtype=dtype, one_host=bool(by_parts)), None
        except Exception as error:  # a user's code may raise anything where numbers are not there
            if asked == "parts":
                raise
            why = why_whole(error)
    return model_of(run_file, objects, device=device, dtype=dtype), None, why


def with_new_model(workload: Workload, run_file: RunFile, device: torch.device) -> Workload:
    """The same workload with a model that no generation has changed yet, before its first step."""
    model, values, _ = _model(run_file, workload.objects, device=device, layout=Layout(), by_parts=None)
    return replace(workload, model=model, values=values)
