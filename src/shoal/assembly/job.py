"""What `shoal train` and a user's own loop have in common: where a run goes on, what it says first, its `Job`.

`run_hooks` finds the functions that the run file names under `[hooks]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TextIO

import msgspec
from blake3 import blake3
from torch import Tensor

from shoal import units
from shoal.assembly.masked_layers import said_of_masks
from shoal.assembly.metering import CompileClock, device_use, feed_of, layer_norms, replica_speeds, scaling
from shoal.assembly.proofs import UnkeyedDraws, missing_proof
from shoal.assembly.run import Run
from shoal.assembly.run_gradients import gathering_of, zero_of
from shoal.assembly.saving import CopySender, build_saver, fetch_newer, save_interval, share_between_hosts
from shoal.checkpoint.agreement import MessageExchange
from shoal.comm.board import Board
from shoal.comm.collective import gather_texts
from shoal.config.named import find_named, users_traceback
from shoal.data.config import BatchConfig
from shoal.engine.copies import Copies
from shoal.engine.loop import Cadence, Hook, Hooks, Job
from shoal.engine.recovery import Loaded, NonfiniteGuard, load_weights, resume
from shoal.engine.state import OPTIMIZER
from shoal.launcher.environment import Place
from shoal.observe.sink import RunStart, Sinks
from shoal.observe.sinks import open_sinks
from shoal.optim.config import Schedule
from shoal.optim.schedule import peak_rate
from shoal.runfile.run_file import RunFile, run_directory
from shoal.state import Held


def run_hooks(run: Run) -> Hooks:
    """Those that the run file names. Raises `UserCodeError` for one that is not there."""
    config = run.run_file.hooks

    def found(key: str, names: list[str]) -> list[tuple[str, Hook]]:
        return [(name, find_named(name, key=f"hooks.{key}")) for name in names]

    return Hooks(
        run.mesh.rank,
        run.model,
        found("after_step", config.after_step),
        found("after_evaluation", config.after_evaluation),
        found("after_save", config.after_save),
        users_traceback,
    )


def sinks_of(run_file: RunFile, place: Place, *, stream: TextIO | None = None) -> Sinks:
    """Who hears how this rank's run goes; rank 0 shows it on `stream`, standard output if there is none."""
    first = place.rank - place.local_rank
    return open_sinks(
        run_file.observe,
        run_directory(run_file),
        rank=place.rank,
        stream=stream or sys.stdout,
        reports_failure=place.launcher != "shoal",  # else the launcher does, which knows whose failure came first
        host_ranks=range(first, first + place.local_world_size),
    )


def run_start(run: Run) -> RunStart:
    """What sinks are told at the start."""
    return RunStart(
        name=run.run_file.run.name,
        total_steps=run.run_file.run.steps,
        first_step=run.state.progress.step + 1,
        generation=run.mesh.generation,
        epoch_samples=None if run.workload.data.endless else run.epoch_samples,
    )


def build_job(
    run: Run,
    directory: Path,
    sinks: Sinks,
    stack: ExitStack,
    *,
    stop_requested: Callable[[], bool],
    exchange: MessageExchange | None = None,
    copies: CopySender | None = None,
    own_loop: bool = False,
) -> Job:
    """What the loop of this rank is made of; `stack` closes it. `exchange` is what saves go by, a board on the run's
    store if there is none; `copies` sends them to a remote store, None: one that ends with `stack`. `own_loop`: the
    script sets learning rates, evaluates and runs the model. Raises `UsageError` for a state that no checkpoint holds,
    and `ConfigError` for what only steps of its own keep.
    """
    if own_loop:
        run.tiers.check_own_loop()
    run_file, mesh, injector = run.run_file, run.mesh, run.process.injector
    run.state.watch.require_evaluations(held_out=run.workload.data.held_out is not None, own_loop=own_loop)
    saver = build_saver(run, directory, exchange)
    saver.check(run.state.tensors(), run.state.to_json(), generation=mesh.generation)
    (copies or stack.enter_context(CopySender())).send(run, saver, directory, sinks)
    feed = stack.enter_context(feed_of(run))
    whole = mesh.layout.replica_size == 1 and zero_of(run_file.memory, mesh) is None
    forward = whole and not own_loop and not run.generation.looks_up
    unkeyed = UnkeyedDraws(run)
    compiling = CompileClock(stack, compiles=run_file.run.compile is not False)
    return Job(
        state=run.state,
        step=run.step if injector is None else injector.around(run.step, run.state, run.model),
        feed=feed,
        guard=NonfiniteGuard(run_file.run.nonfinite_limit, run.step.context, forward=forward, ids=feed.sample_ids),
        saver=saver,
        sinks=sinks,
        cadence=Cadence(
            run_file.run.steps,
            evaluate_every=run_file.observe.evaluate_every_steps,
            loads_every=_loads_every(run),
            compare_every=run_file.observe.compare_every_steps,
        ),
        rate=_none if own_loop else run.rate,
        evaluate=None if own_loop or run.workload.data.held_out is None else run.evaluate,
        stop_requested=stop_requested,
        figures=lambda: _figures(run, sinks, unkeyed, compiling),
        compare=_comparison(run),
        speeds=replica_speeds(run, feed, sinks),
        hooks=run_hooks(run),
        saves=save_interval(run, directory, sinks),
        layer_norms=layer_norms(run),
        scaling=scaling(run),
        device_use=None if own_loop else device_use(run, directory, sinks),
        origin={"layout": mesh.layout.to_dict(), "generation": mesh.generation},
        world=mesh.world,
    )


def _loads_every(run: Run) -> int:
    """Of the ranks that hold the same layers, the first tells how loaded their experts are."""
    first = run.mesh.axis("replicate", "shard", "context", "tensor").rank == 0
    return run.run_file.observe.expert_loads_every_steps if first else 0


def restore(run: Run, directory: Path, sinks: Sinks, exchange: MessageExchange | None = None) -> int | None:
    """The step that the run goes on from; None for a fresh start, with the weights of a warm start if one is named.

    By `exchange`, a board on the run's store if there is none, hosts that share no directory bring each other the
    newest checkpoint. Raises `VerificationFailed` where ranks have loaded, or drawn, different weights.
    """
    world, injector = run.mesh.world, run.process.injector
    if injector is not None:
        injector.reached("recovery/before")
    if run.run_file.checkpoint.remote is not None:
        sinks.activity(f"looking for a newer checkpoint in {run.run_file.checkpoint.remote}")
    fetch_newer(run, directory, sinks)
    share_between_hosts(run, directory, exchange, sinks)
    loaded = resume(
        run.state,
        directory,
        announce=run.process.announce if injector is None else injector.announce(run.process.announce),
        warn=sinks.warn,
        collect=lambda text: gather_texts(text, world, device=run.device),
        activity=sinks.activity,
    )
    source = run.run_file.run.warm_start
    if loaded is None and source is not None:
        sinks.activity(f"verifying and loading the weights of {source}")
        repair = "Let run.warm_start name a checkpoint of this model, or leave the key out"
        step = load_weights(
            run.state,
            Path(source),
            announce=run.process.announce,
            repair=repair,
            with_order=run.run_file.run.warm_start_data,
        )
        sinks.note(f"weights from step {step} of {source}")
    if run.run_file.observe.compare_every_steps != 0:
        _compare_start(run, loaded)
    if injector is not None and loaded is not None:
        injector.reached("recovery/after")
    sinks.activity("")
    return None if loaded is None else loaded.step


def _compare_start(run: Run, loaded: Loaded | None) -> None:
    """All ranks have loaded the same checkpoint, or none, and what several hold of it is the same."""
    copies = _copies(run, "start")
    copies.require_same(
        "no checkpoint" if loaded is None else f"the checkpoint of step {loaded.step} ({loaded.hash or 'no hash'})",
        what="has loaded",
        repair="Do all hosts see the same run directory?",
    )
    progress, facts = run.state.progress, msgspec.json.encode(run.state.progress.facts(), order="sorted")
    copies.require_same(
        f"step {progress.step} and {progress.samples} samples (progress {blake3(facts).hexdigest()[:16]})",
        what="stands at",
        repair="Start all ranks again, with the same run file",
    )
    copies.compare(run.state.tensors(), when="before the first step")


def _copies(run: Run, name: str) -> Copies:
    board = Board(run.process.store, timeout_s=run.run_file.wire.timeout_s)
    return Copies(run.mesh.world, board.under(f"copies/{run.mesh.generation}/{name}"), device=run.device)


def _comparison(run: Run) -> Callable[[], None]:
    """Compares what ranks hold of the state as it is when it is called."""
    copies, state = _copies(run, "run"), run.state
    served = run.generation.agreement.served is not None

    def compare() -> None:
        held = state.tensors()
        if served:  # servers count the updates of their own parts
            held = {name: one for name, one in held.items() if not _is_count(name, one)}
        copies.compare(held, when=f"after step {state.progress.step}")

    return compare


def _is_count(name: str, held: Held) -> bool:
    return name.startswith(OPTIMIZER) and isinstance(held, Tensor) and held.dim() == 0


def introduce(sinks: Sinks, run: Run, resumed_step: int | None) -> None:
    """Says what is about to run."""
    data = run.workload.data
    endless = "a stream" if data.iterable is None else "the items of an iterable"
    samples = endless if data.endless else units.plural(len(data.train), "training sample")
    split = run.generation.parts.split
    parameters = said_of_parameters(split.shapes, split.frozen)
    sinks.note(f"{run.mesh.layout.describe()} on {run.device.type}, {parameters}, {samples}")
    if data.said_of_targets:
        sinks.note(data.said_of_targets)
    if run.mesh.layout.world_size > 1:
        sinks.note(run.mesh.world.wire)
    table = run.generation.parts.table
    if table is not None and not table.flushes:
        sinks.note(f"PipeDream: {table.microbatches} updates a step, from weights up to {table.stages - 1} updates old")
    if run.workload.whole is not None:
        sinks.warn(run.workload.whole)
    gathering = gathering_of(run.run_file.memory, run.generation.parts, run.mesh)
    if gathering is not None:
        blocks_found, said = gathering
        (sinks.note if blocks_found else sinks.warn)(said)
    if run.run_file.sparsity is not None:
        sinks.note(said_of_masks(run.run_file, split))
    if not run.workload.optimizers:
        _, scaling = peak_rate(run.run_file.optimizer, global_samples=run.run_file.batch.global_samples)
        unproved = missing_proof(run.run_file, run.generation.parts.split.shapes)
        for said in (scaling, below_peak(run.run_file.schedule, run.run_file.run.steps), unproved):
            if said is not None:
                sinks.note(said)
    repeated = None if data.endless else used_twice_in_a_step(run.run_file.batch, len(data.train))
    if repeated is not None:
        sinks.warn(repeated)
    if resumed_step is not None:
        sinks.note(f"resuming from the checkpoint of step {resumed_step}")
    if resumed_step is not None and resumed_step >= run.run_file.run.steps:
        sinks.warn(
            f"run.steps = {run.run_file.run.steps} are done already: nothing to train; raise it to go on, or give "
            "--fresh to train a new run"
        )


def said_of_parameters(shapes: Mapping[str, Sequence[int]], frozen: Collection[str]) -> str:
    """How many there are, and how many of them train, if not all."""
    count = sum(prod(shape) for shape in shapes.values())
    trained = sum(prod(shape) for name, shape in shapes.items() if name not in frozen)
    return f"{count:,} parameters" if trained == count else f"{trained:,} of {count:,} parameters train"


def used_twice_in_a_step(config: BatchConfig, samples: int) -> str | None:
    """A sentence where a step goes on into the next epoch and takes more samples than there are, None elsewhere."""
    batch = config.global_samples
    if config.epoch_end != "straddle" or batch <= samples:
        return None
    return (
        f"batch.global_samples = {batch}, and the training data has {units.plural(samples, 'sample')}: each step uses "
        f"some of them several times; a batch of {samples} or less uses each once an epoch"
    )


def below_peak(schedule: Schedule, steps: int) -> str | None:
    """A sentence where the run ends before its learning rate has reached its peak, None elsewhere."""
    warmup = schedule.warmup_steps
    if warmup < steps:
        return None
    return f"the learning rate only rises: schedule.warmup_steps = {warmup} and run.steps = {steps}"


def _none(number: int) -> None:
    """No learning rate but the optimizer's own."""


def _figures(run: Run, sinks: Sinks, unkeyed: UnkeyedDraws, compiling: CompileClock) -> dict[str, float]:
    """What the compiler, the codec and the strategy measured in the step just taken; says what was chosen and drawn."""
    for news in filter(None, (*unkeyed.news(), compiling.sentence(), *run.state.take_notes())):
        sinks.note(news)
    coded = run.generation.coded
    for line in [] if coded is None else coded.take_lines():
        sinks.note(line)
    for line in [] if run.step.links is None else run.step.links.take_lines():
        sinks.note(f"links: {line}")
    measured = {} if coded is None else coded.take_figures()
    agreed, kept = run.generation.agreement.take_figures(), run.tiers.take_figures()
    for line in (*run.tiers.take_lines(), *run.state.take_lines()):
        sinks.warn(line)
    return {**measured, **agreed, **kept, **run.state.figures(), **compiling.take_figures()}
