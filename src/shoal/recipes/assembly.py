"""The parts of a run on one rank, each made from the setting: sync, state, step, feed."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.data.cursor import Cursor
from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.engine.noise import NoiseMeter
from shoal.engine.pipedream_step import PipeDreamStep
from shoal.engine.pipelined import PipelinedPasses
from shoal.engine.precision import scaler_of
from shoal.engine.priority_step import PriorityStep
from shoal.engine.state import HeldWeight, TrainState, held_pieces
from shoal.engine.step import TrainStep
from shoal.engine.step_context import StepContext
from shoal.engine.step_protocol import Step
from shoal.errors import ConfigError, UserCodeError
from shoal.optim.build import build_optimizer
from shoal.optim.schedule import peak_rate
from shoal.parallel.pipeline.stages import Stages
from shoal.recipes.setting import Setting
from shoal.recipes.splitting import blocks_in
from shoal.sync.build import build_priority_sync, build_sync
from shoal.sync.priority import PrioritySync
from shoal.sync.strategy import Sync
from shoal.topology.axes import Axis

ZERO_OF_SHARD = 3
"""What the ranks of `layout.shard` split where `memory.zero` is left out: all, as users of FSDP expect."""


_NORMED_TOGETHER: Mapping[bool, tuple[Axis, ...]] = {
    False: ("pipeline", "shard", "context", "tensor"),
    True: ("shard", "context", "tensor"),
}
"""Whose gradients have one norm: those of a replica, or of one stage where stages are at different updates."""


def zero_of(setting: Setting) -> int | None:
    """The stage of ZeRO; None where no rank shares its copy of the model with others that see other samples."""
    if setting.mesh.layout.shard == 1:
        return None
    return setting.run_file.memory.zero or ZERO_OF_SHARD


def new_sync(setting: Setting) -> Sync:
    """How gradients are agreed on, and what this rank's optimizer runs on. The parameters' memory may be moved."""
    mesh, parts, config = setting.mesh, setting.parts, setting.run_file.gradients
    if setting.device.type == "cpu" and not setting.place.one_host:
        config = config.between_hosts()
    if config.schedule == "priority":
        lane = mesh.axis("replicate", lane="gradients")
        return build_priority_sync(config, setting.trained, model=setting.model, lane=lane, ledger=mesh.ledger)
    return build_sync(
        config,
        zero_of(setting),
        setting.trained,
        model=setting.model,
        groups=mesh.ranks,
        replica=mesh.axis(*_NORMED_TOGETHER[setting.run_file.pipeline.asynchronous]),
        blocks=blocks_in(setting.model, parts.stages, mesh.layout.index("pipeline", mesh.rank)),
        world=mesh.world,
    )


def new_state(setting: Setting, sync: Sync) -> TrainState:
    """The state before the first step."""
    run_file, split = setting.run_file, setting.parts.split
    parameters = [(owned.name, owned.parameter, split.roles[owned.name].decay) for owned in sync.owned]
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    state = TrainState(
        setting.model,
        build_optimizer(run_file.optimizer, parameters, lr=peak),
        scaler_of(run_file.precision),
        Cursor(),
        {
            "run.seed": run_file.run.seed,
            "data.shuffle": run_file.data.shuffle,
            "the number of training samples": len(setting.data.train),
            "optimizer.kind": type(run_file.optimizer).__struct_config__.tag,
        },
    )
    state.sync = sync.remembered
    if setting.mesh.layout.replica_size > 1:
        state.owned, state.held = sync.owned, _held(setting, sync)
        state.names = {*split.shapes, *split.buffers}
    return state


def new_step(setting: Setting, state: TrainState, sync: Sync) -> Step:
    """The step that moves `state`. Raises `ConfigError` where the gradient's noise cannot be measured."""
    if setting.run_file.pipeline.asynchronous:
        return new_pipedream_step(setting, state, sync)
    context, optimizer = _step_context(setting, state), state.optimizer
    if isinstance(sync, PrioritySync):
        return PriorityStep(context, optimizer=optimizer, sync=sync)
    clip_norm, noise = setting.run_file.optimizer.clip_norm, _noise_meter(setting, sync)
    return TrainStep(context, optimizer=optimizer, sync=sync, clip_norm=clip_norm, noise=noise)


def new_pipedream_step(setting: Setting, state: TrainState, sync: Sync) -> PipeDreamStep:
    """The step of a pipeline that updates after each microbatch. Raises `UserCodeError` for tied parameters."""
    passes, clip_norm = setting.passes, setting.run_file.optimizer.clip_norm
    assert isinstance(passes, PipelinedPasses), "without a pipeline, the run file is refused"
    _check_untied(passes.stages)
    context = _step_context(setting, state)
    return PipeDreamStep(context, passes, optimizer=state.optimizer, sync=sync, clip_norm=clip_norm)


def _step_context(setting: Setting, state: TrainState) -> StepContext:
    mesh = setting.mesh
    place = mesh.layout.coordinate(mesh.rank)
    return StepContext(
        setting.passes,
        group=mesh.world,
        twins=mesh.axis("replicate", "shard", "context", "tensor"),
        ledger=mesh.ledger,
        scaler=state.scaler,
        randomness=setting.passes.compute.randomness,
        device=setting.device,
        counts=place.pipeline == place.context == place.tensor == 0,
    )


def _check_untied(stages: Stages) -> None:
    tied = [name for name in dict.fromkeys(stages.aliases.values()) if len(stages.holders(name)) > 1]
    if tied:
        raise UserCodeError(
            f"{tied[0]} is used by several stages, which are at different updates under PipeDream; give each a "
            "parameter of its own, or choose another pipeline.schedule"
        )


def _noise_meter(setting: Setting, sync: Sync) -> NoiseMeter | None:
    """None where it is not asked for. Raises `ConfigError` for a parameter whose gradient is whole only once summed."""
    every, layout, rank = setting.run_file.observe.noise_every_steps, setting.mesh.layout, setting.mesh.rank
    if every == 0:
        return None
    shares, place = layout.group(("replicate", "shard"), rank), layout.coordinate(rank)
    for trained in setting.trained:
        if trained.holding.sums != shares:
            raise ConfigError(
                f"observe.noise_every_steps: the gradient of {trained.holding.name} is summed over other ranks than "
                "those that see other samples; measure the noise under another layout, or leave the key out"
            )
    return NoiseMeter(
        sync.own,
        setting.mesh.world,
        every=every,
        counts=place.pipeline == place.tensor == 0,
        told_apart=layout.pipeline == 1,
        device=setting.device,
    )


def new_feed(setting: Setting, cursor: Cursor, *, share: tuple[int, int] | None = None) -> Feed:
    """The samples of this rank's `share` of every step, (index, number), from `cursor` on."""
    run_file = setting.run_file
    replica, replicas = setting.mesh.batch_share if share is None else share
    order = Order(len(setting.data.train), run_file.run.seed, shuffle=run_file.data.shuffle)
    return Feed(
        setting.data.train,
        order,
        replicas=replicas,
        replica=replica,
        global_samples=run_file.batch.global_samples,
        micro_samples=setting.microbatching.samples,
        group=setting.group_samples,
        denominator=run_file.batch.denominator,
        start=cursor,
        prefetch_steps=run_file.data.prefetch_steps,
        readers=run_file.data.readers,
    )


def _held(setting: Setting, sync: Sync) -> list[HeldWeight]:
    """The weights that are saved from this rank: what it computes with, or under ZeRO-3 what it updates."""
    split = setting.parts.split
    held = [HeldWeight(holding.name, p, holding.global_shape, holding.box) for holding, p in split.held]
    if zero_of(setting) != 3:
        return held
    return [*held_pieces(sync.owned), *(weight for weight in held if weight.name in split.frozen)]
