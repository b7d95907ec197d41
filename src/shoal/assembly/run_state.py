"""The state of a run on one rank: what its checkpoints hold, by sections."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.assembly.generation import Generation
from shoal.assembly.reading import chosen_samples, epoch_samples
from shoal.assembly.run_gradients import parts_on, zero_of
from shoal.assembly.sameness import contents_of
from shoal.assembly.sparse import Placed, build_freezing, build_sparse
from shoal.assembly.train_step import watch_layers
from shoal.assembly.trainable import FrozenParameters
from shoal.assembly.workload import Workload
from shoal.engine.extra_state import ExtraSection
from shoal.engine.growing_batch import BatchGrowth
from shoal.engine.precision import LossScaler
from shoal.engine.save_policy import Watch
from shoal.engine.state import (
    OPTIMIZER,
    FactsSection,
    HeldWeight,
    ModelSection,
    OptimizerSection,
    Progress,
    TrainState,
    held_pieces,
)
from shoal.errors import ConfigError
from shoal.gradients.residuals import ResidualSection
from shoal.memory.streamed_state import NEXT_WEIGHT
from shoal.optim.build import build_optimizer
from shoal.optim.declared import Slot
from shoal.optim.parts import SeesParts
from shoal.optim.schedule import peak_rate
from shoal.runfile.run_file import RunFile
from shoal.runfile.training_rules import width_key
from shoal.state import Owned, Section, boxes_in, targets_of
from shoal.topology.holding import Holding


def build_state(run_file: RunFile, generation: Generation, workload: Workload, scaler: LossScaler) -> TrainState:
    """The state before the first step. Raises `ConfigError` for an optimizer of the script that servers cannot use."""
    agreement, own = generation.agreement, workload.optimizers
    if agreement.served is not None and own:
        raise ConfigError(
            'sync.kind = "server" with an optimizer of the script: servers make theirs from [optimizer]; leave '
            "one of the two out"
        )
    model = _model_section(run_file, generation, workload)
    section = _NewSection(run_file, generation, workload)
    left_out: list[Section] = []
    if own:
        _refuse_own(run_file)
        first, *others = _adopted(run_file, generation, workload, section)
    else:
        built = _connected(_built(run_file, generation), run_file, generation)
        delayed = run_file.memory.offload.delay_update_after is not None
        ahead = (Slot(NEXT_WEIGHT),) if delayed else ()
        first, others = section(built, (*run_file.optimizer.all_slots, *ahead)), []
        left_out = _left_out(run_file, generation, workload, built)
    rest = [
        *others,
        FactsSection("scaler", scaler),
        *_of_gradients(run_file, generation),
        *left_out,
        *agreement.sections,
        *_of_script(generation, workload),
    ]
    batch, watch = run_file.batch, Watch(run_file.checkpoint.keep_best, run_file.run.stop_when)
    growth = None if batch.adaptive is None else BatchGrowth(batch.adaptive, largest=batch.global_samples)
    progress = Progress(_identity(run_file, workload), contents_of(workload.samples))
    return TrainState(model, first, progress, rest, watch, growth)


def _identity(run_file: RunFile, workload: Workload) -> dict[str, Any]:
    """What may not change from one start of the run to the next."""
    return {
        "run.seed": run_file.run.seed,
        "data.shuffle": run_file.data.shuffle,
        **chosen_samples(run_file, workload.data),
        "the number of training samples": epoch_samples(run_file.batch, len(workload.data.train)),
        "optimizer.kind": " and ".join(o.kind for o in workload.optimizers) or run_file.optimizer.identity,
        **({} if run_file.sparsity is None else {"sparsity.kind": run_file.sparsity.variant}),
    }


def _steps_parts(run_file: RunFile, generation: Generation, workload: Workload) -> bool:
    """Whether the optimizer may step other tensors than the parameters of the whole model."""
    zero = zero_of(run_file.memory, generation.mesh)
    return generation.mesh.layout.replica_size > 1 or zero is not None or workload.precision.mixed is not None


def _model_section(run_file: RunFile, generation: Generation, workload: Workload) -> ModelSection:
    """The weights that this rank saves."""
    split, gradients, served = generation.parts.split, generation.gradients, generation.agreement.served
    if _steps_parts(run_file, generation, workload):
        mixed = workload.precision.mixed is not None
        held = _held(generation, in_pieces=mixed or zero_of(run_file.memory, generation.mesh) == 3)
        names = {*split.shapes, *split.buffers}
        return ModelSection(split.model, held, gradients.owned, names, gradients.gather if mixed else None)
    if served is not None and any(role.kind == "table" for role in split.roles.values()):
        held = _held_beside_tables(generation, served)
        return ModelSection(split.model, held, names={*split.shapes, *split.buffers})
    return ModelSection(split.model)


class _NewSection:
    """Makes the section of an optimizer that steps what this rank owns or serves."""

    def __init__(self, run_file: RunFile, generation: Generation, workload: Workload) -> None:
        split, served = generation.parts.split, generation.agreement.served
        self._split, self._owned, self._names = split, None, ()
        if _steps_parts(run_file, generation, workload):
            self._owned, self._names = generation.gradients.owned, {*split.shapes, *split.buffers}
        elif served is not None:
            self._owned, self._names = served, {*split.shapes}
        shared = served is not None or generation.sync.keeps_replicas_equal
        self._replica = None if shared else generation.mesh.layout.index("replicate", generation.mesh.rank)

    def __call__(
        self, optimizer: torch.optim.Optimizer, slots: Sequence[Slot], only: Collection[str] | None = None
    ) -> OptimizerSection:
        """`only`: the parameters that are its; None: all."""
        names, split = self._names, self._split
        known = {*names, *split.shapes} if isinstance(optimizer, SeesParts) else names  # some have slots elsewhere
        return OptimizerSection(optimizer, slots, split.model, self._owned, known, replica=self._replica, only=only)


def _adopted(
    run_file: RunFile, generation: Generation, workload: Workload, section: _NewSection
) -> list[OptimizerSection]:
    """The script's optimizers step what this rank owns, and begin with the state that they have."""
    stepped, found = [(owned.name, owned.parameter) for owned in generation.gradients.owned], []
    for each in workload.optimizers:
        optimizer = _connected(each.adopt(stepped), run_file, generation)
        made = section(optimizer, each.slots, None if len(workload.optimizers) == 1 else each.names)
        _begin_with(made, each.taken)
        found.append(made)
    return found


def _of_gradients(run_file: RunFile, generation: Generation) -> list[Section]:
    """The size of buckets that was found, and what codecs have not sent so far."""
    gradients, optimizer, codec = generation.gradients, run_file.optimizer, run_file.codec
    sender, feedback = (optimizer, True) if optimizer.sends_momentum else (codec, codec.feedback)
    exchanges = [] if generation.coded is None else generation.coded.made
    residuals = ResidualSection(sender.variant, exchanges, gradients.owned, feedback=feedback)
    return [*([] if gradients.tuned is None else [FactsSection("gradients", gradients.tuned)]), residuals]


@torch.no_grad()
def _begin_with(section: OptimizerSection, whole: Mapping[str, Tensor]) -> None:
    """The optimizer has this state of whole parameters, by slot and parameter; of each, what this rank steps."""
    saved = {f"{OPTIMIZER}{key}": value for key, value in whole.items()}
    for name, held in section.targets({name: value.dtype for name, value in saved.items()}).items():
        for target in targets_of(held):
            target.tensor.copy_(saved[name][target.box.slices])


def _built(run_file: RunFile, generation: Generation) -> torch.optim.Optimizer:
    """The run file's optimizer, over what this rank owns, or serves to all."""
    roles, served = generation.parts.split.roles, generation.agreement.served
    stepped = generation.gradients.owned if served is None else served
    parameters = [(owned.name, owned.parameter, roles[owned.name].decay) for owned in stepped]
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    sparse = [name for name, role in roles.items() if role.kind == "table"]
    shapes = {owned.name: owned.holding.global_shape for owned in stepped}
    kinds = {name: role.kind for name, role in roles.items()}
    widened = {name: role.widened for name, role in roles.items()}
    return build_optimizer(
        run_file.optimizer, parameters, lr=peak, sparse=sparse, shapes=shapes, kinds=kinds, widened=widened
    )


def _left_out(
    run_file: RunFile, generation: Generation, workload: Workload, optimizer: torch.optim.Optimizer
) -> list[Section]:
    """What is frozen for a part of the run, and what is masked."""
    mesh, parts, owned, masks = generation.mesh, generation.parts, generation.gradients.owned, generation.masks
    replica = mesh.axis("pipeline", "shard", "context", "tensor")
    found: list[Section] = []
    if run_file.freeze is not None and run_file.freeze.changes:
        found.append(build_freezing(run_file, parts, owned, optimizer, masks=masks, mesh=mesh, replica=replica))
    if run_file.sparsity is not None:
        placed = Placed(mesh.device, workload.dtype)
        found.append(
            build_sparse(
                run_file, parts.split, owned, optimizer,
                masks=masks, group=mesh.world, placed=placed, replica=replica,
            )
        )  # fmt: skip
    return found


def _refuse_own(run_file: RunFile) -> None:
    """Raises `ConfigError` for tables that say what is trained, where a script's optimizer says it."""
    tables = {name: getattr(run_file, name) for name in ("sparsity", "freeze", "adapter", "distillation")}
    if (key := width_key(run_file)) is not None:
        raise ConfigError(
            f"model.{key} with an optimizer of the script, whose rates are its own: train the model by `shoal train`, "
            "or leave it out"
        )
    given = next((name for name, table in tables.items() if table is not None), None)
    if given is not None:
        raise ConfigError(
            f"[{given}] with an optimizer of the script, which decides by itself what is trained: train the model by "
            f"`shoal train`, or leave [{given}] out"
        )


def _connected(optimizer: torch.optim.Optimizer, run_file: RunFile, generation: Generation) -> torch.optim.Optimizer:
    """The same; one that asks something of whole parameters is told where their parts are, and one that sees layers is
    given them. Raises `ConfigError` where layers are not whole.
    """
    watch_layers(optimizer, run_file, generation)
    if isinstance(optimizer, SeesParts) and generation.agreement.served is None:
        parts = parts_on(run_file, generation.gradients.owned, generation.mesh, generation.sync)
        optimizer.connect(parts.of(optimizer))
    return optimizer


def _of_script(generation: Generation, workload: Workload) -> list[Section]:
    """The state of what a script passed."""
    if not workload.optimizers:
        return [ExtraSection(workload.objects.state)] if workload.objects.state else []
    groups = ["optimizer_groups", *(f"optimizer_groups_{n}" for n in range(1, len(workload.optimizers)))]
    own = [FactsSection(name, optimizer) for name, optimizer in zip(groups, workload.optimizers, strict=False)]
    frozen = FrozenParameters(generation.seen)
    extra = [ExtraSection(workload.objects.state)] if workload.objects.state else []
    return [*own, FactsSection("frozen", frozen), *extra]


def _held_beside_tables(generation: Generation, served: Sequence[Owned]) -> list[HeldWeight]:
    """Where servers hold the tables: this rank's copy of the other weights, and what it serves of the tables."""
    split = generation.parts.split
    tables = [owned for owned in served if split.roles[owned.name].kind == "table"]
    away = {name for name, role in split.roles.items() if role.kind == "table" and name not in split.frozen}
    held = _weights(split.held)
    return [*(weight for weight in held if weight.name not in away), *held_pieces(tables)]


def _held(generation: Generation, *, in_pieces: bool) -> list[HeldWeight]:
    """The weights that are saved from this rank: what it computes with, or (under ZeRO-3, and of masters) what it
    updates.
    """
    split = generation.parts.split
    if not in_pieces:
        return _weights(split.held)
    whole = [(holding, each) for holding, each in split.held if holding.name in split.frozen]
    # A parameter without elements is in nobody's piece.
    empty = [(holding, torch.empty(each.shape, dtype=each.dtype)) for holding, each in split.held if each.numel() == 0]
    return [*held_pieces(generation.gradients.owned), *_weights([*whole, *empty])]


def _weights(held: Sequence[tuple[Holding, Tensor]]) -> list[HeldWeight]:
    return [
        HeldWeight(holding.name, part, holding.global_shape, box)
        for holding, parameter in held
        for box, part in boxes_in(holding, parameter)
    ]
