"""The step that a run file asks for: when its updates are made, what happens to gradients, what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from shoal.assembly.generation import Generation
from shoal.assembly.run_gradients import SAME_LAYERS, parts_on
from shoal.assembly.sparse import left_out_in
from shoal.assembly.splitting import trained_in
from shoal.engine.closures import ByClosure
from shoal.engine.forward_backward import PipelinedForwardBackward
from shoal.engine.growing_batch import BatchGrowth
from shoal.engine.measure import LayerNorms
from shoal.engine.precision import LossScaler
from shoal.engine.rank_context import RankContext
from shoal.engine.state import TrainState
from shoal.engine.step import TrainStep
from shoal.engine.tally import NoiseMeter
from shoal.engine.transforms import Transform, by_numbers, clip_by_global_norm
from shoal.engine.updates import AtOnce, ByBucket, ByMicrobatch, LeavesOut, UpdatePolicy
from shoal.errors import ConfigError, UserCodeError
from shoal.gradients.priority import PriorityGradients
from shoal.optim.layer_statistics import SeesLayers, layers_in
from shoal.optim.newton import SearchingOptimizer
from shoal.optim.transforms import Chain
from shoal.parallel.pipeline.stages import Stages
from shoal.runfile.run_file import RunFile
from shoal.runfile.training_rules import layers_refusal
from shoal.topology.layout import Axis


def build_step(
    run_file: RunFile,
    generation: Generation,
    state: TrainState,
    scaler: LossScaler,
) -> TrainStep:
    """The step that the optimizer of `state` takes. Raises `ConfigError` if the gradient's noise cannot be measured,
    and `UserCodeError` for parameters that several stages of PipeDream use.
    """
    mesh, axes = generation.mesh, generation.sync.lockstep_axes
    same_layers: list[Axis] = [axis for axis in SAME_LAYERS if axis in axes]
    place = mesh.layout.coordinate(mesh.rank)
    context = RankContext(
        generation.forward_backward,
        lockstep=mesh.axis(*axes),
        data_parallel_group=mesh.axis(*same_layers),
        ledger=mesh.ledger,
        scaler=scaler,
        counts=place.pipeline == place.context == place.tensor == 0,
    )
    optimizer = generation.agreement.stepped_by(state.optimizer.optimizer)
    policy = _update_policy(run_file, generation, optimizer, left_out_in(state), state.growth)
    return TrainStep(context, policy, generation.agreement)


def watch_layers(optimizer: torch.optim.Optimizer, run_file: RunFile, generation: Generation) -> None:
    """Gives `optimizer` the layers of this rank, if it sees layers. Raises `ConfigError` where they are not whole."""
    if not isinstance(optimizer, SeesLayers):
        return
    reduces = optimizer.weight_sharing == "reduce"
    if (refused := layers_refusal(run_file, type(optimizer).__name__, reduces=reduces)) is not None:
        raise ConfigError(refused)
    names = {id(trained.parameter): trained.holding.name for trained in trained_in(generation.parts)}
    axes: list[Axis] = [axis for axis in SAME_LAYERS if axis in generation.sync.lockstep_axes]
    layers = layers_in(generation.parts.split.model, names)
    optimizer.watch(layers, generation.mesh.axis(*axes), seed=run_file.run.seed)
    generation.forward_backward.compute.announces.append(optimizer.microbatch)
    generation.forward_backward.compute.looks.append(optimizer.look)


def _update_policy(
    run_file: RunFile,
    generation: Generation,
    optimizer: torch.optim.Optimizer,
    leaves_out: Sequence[LeavesOut],
    growth: BatchGrowth | None,
) -> UpdatePolicy:
    gradients, clip_norm = generation.gradients, run_file.optimizer.clip_norm
    if run_file.pipeline.asynchronous:
        forward_backward = cast(PipelinedForwardBackward, generation.forward_backward)  # the rules ask for a pipeline
        _check_untied(forward_backward.stages)
        return ByMicrobatch(
            gradients,
            optimizer,
            forward_backward=forward_backward,
            clip_norm=clip_norm,
        )
    if run_file.gradients.schedule == "priority":
        return ByBucket(cast(PriorityGradients, gradients), optimizer)
    if isinstance(optimizer, SearchingOptimizer):
        return ByClosure(gradients, optimizer)
    transforms: list[Transform] = [] if clip_norm is None else [clip_by_global_norm(clip_norm)]
    if run_file.optimizer.transforms:
        parts = parts_on(run_file, gradients.owned, generation.mesh, generation.sync)
        transforms.append(by_numbers(Chain(run_file.optimizer.transforms, parts, run_file.run.seed)))
    return AtOnce(
        gradients,
        optimizer,
        transforms=transforms,
        noise=_noise_meter(run_file, generation, growth=growth),
        leaves_out=leaves_out,
    )


def _check_untied(stages: Stages) -> None:
    tied = [name for name in dict.fromkeys(stages.aliases.values()) if len(stages.holders(name)) > 1]
    if tied:
        raise UserCodeError(
            f"{tied[0]} is used by several stages, which are at different updates under PipeDream; give each a "
            "parameter of its own, or choose another pipeline.schedule"
        )


def _noise_meter(run_file: RunFile, generation: Generation, *, growth: BatchGrowth | None) -> NoiseMeter | None:
    """None unless asked for. Raises `ConfigError` for a parameter whose gradient is whole only once it is summed."""
    mesh, every = generation.mesh, run_file.observe.noise_every_steps
    if every == 0:
        return None
    layout = mesh.layout
    shares, place = layout.group(("replicate", "shard"), mesh.rank), layout.coordinate(mesh.rank)
    for trained in trained_in(generation.parts):
        if trained.holding.sums != shares:
            raise ConfigError(
                f"observe.noise_every_steps: the gradient of {trained.holding.name} is summed over other ranks than "
                "those that see other samples; measure the noise under another layout, or leave the key out"
            )
    layers = None
    if run_file.observe.noise_by_layer:
        sizes = generation.parts.split.trained_sizes
        layers = LayerNorms(generation.gradients, mesh.world, sizes, every=every, device=mesh.device)
    return NoiseMeter(
        generation.gradients.own,
        mesh.world,
        every=every,
        counts=place.pipeline == place.tensor == 0,
        separates_microbatches=layout.pipeline == 1,
        device=mesh.device,
        growth=growth,
        layers=layers,
    )
