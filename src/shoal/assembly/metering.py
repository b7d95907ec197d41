"""What a run measures beside its steps: the gradient by layers, the speed-up against one rank, its replicas' speeds,
how well its device is used, what its compiler takes.
"""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal.assembly.run import Run
from shoal.comm.board import Board
from shoal.config.load import dumps
from shoal.data.config import PythonData
from shoal.data.dataset import calls_user_code
from shoal.data.feed import CHANGEABLE_AT_ONCE, SMALL_AT_ONCE, Feed
from shoal.engine.forward_backward import SequentialForwardBackward
from shoal.engine.growing_batch import GrowingFeed
from shoal.engine.measure import LayerNorms, ReplicaSpeeds
from shoal.observe.device_use import DeviceUse, OwnGpu, Peak
from shoal.observe.facts import write_facts
from shoal.observe.goodput import Scaling, one_rank_rate
from shoal.observe.host_usage import GpuUsage
from shoal.observe.profile.first_step import StepLook, StepOperations
from shoal.observe.sink import Sinks
from shoal.resilience.detection import Lasting, Stragglers
from shoal.topology.devices import known_device


def feed_of(run: Run) -> Feed | GrowingFeed:
    """The feed that a run trains from: of steps that grow, under `batch.adaptive`. Close it."""
    if (growth := run.state.growth) is not None:
        return GrowingFeed(growth, lambda samples: run.feed(steps_of=samples))
    feed = run.feed()
    read_beside_steps(run, feed)
    return feed


def read_beside_steps(run: Run, feed: Feed) -> None:
    """From now on `feed` is read when the steps of `run` leave time for it."""
    data, augments = run.run_file.data, any(":" in name for name in run.run_file.data.augment)
    fixed = run.run_file.batch.division == "even" and not run.workload.data.endless
    changeable = augments or isinstance(data, PythonData)
    begins_backward = feed.in_backwards(
        small_at_once=(CHANGEABLE_AT_ONCE if changeable else SMALL_AT_ONCE) if fixed else 1,
        quick_by_loop=fixed
        and data.reader_kind == "threads"
        and run.device.type == "cpu"
        and not (augments or calls_user_code(run.workload.data.train)),
    )
    run.step.compute.on_backward.append(begins_backward)


def replica_speeds(run: Run, feed: Feed | GrowingFeed, sinks: Sinks) -> ReplicaSpeeds | None:
    """What measures the replicas' speeds, and divides the work of `feed` by them where that is asked for."""
    mesh, first = run.mesh, run.mesh.rank == 0
    replica = mesh.layout.index("replicate", mesh.rank)
    replicas = mesh.layout.replicate - run.run_file.sync.serving_only
    if replicas == 1:
        return None
    run_file = run.run_file
    divides, observe = run_file.batch.division == "by_speed", run_file.observe
    board = None
    if run_file.sync.replicas_are != "lockstep":
        board = Board(run.process.store, timeout_s=run_file.wire.timeout_s).under(f"speeds/{mesh.generation}")
    return ReplicaSpeeds(
        mesh.world,
        replica if replica < replicas else None,
        replicas,
        mesh.device,
        warn=sinks.warn if first else _unsaid,
        divide=feed.divide if divides and isinstance(feed, Feed) else None,
        stragglers=Stragglers(observe.straggler_factor, observe.straggler_steps),
        lasting=Lasting(observe.straggler_s),
        board=board,
    )


class CompileClock:
    """Seconds in which `torch.compile` was at work on this rank: when it first meets a function, and whenever inputs of
    another size or a changed flag make it compile that again. Runs that compile nothing do not import a compiler.
    """

    def __init__(self, stack: ExitStack, *, compiles: bool) -> None:
        self._began_s = self._took_s = 0.0
        self._programs = 0
        if not compiles and "torch._dynamo" not in sys.modules:  # which a script's own torch.compile imports
            return
        from torch._dynamo.callback import callback_handler as handler

        handler.register_start_callback(self._started)
        handler.register_end_callback(self._ended)
        stack.callback(self._leave, handler)

    def take_figures(self) -> dict[str, float]:
        """Those since the step before, an evaluation's too; {} where nothing was compiled."""
        took_s, self._took_s, self._programs = self._took_s, 0.0, 0
        return {"time/compile": took_s} if took_s else {}

    def sentence(self) -> str:
        """What was compiled since the step before; "" where nothing was."""
        programs = f"{self._programs} program{'s' * (self._programs != 1)}"
        return f"torch.compile took {self._took_s:.1f} s, for {programs}" if self._took_s else ""

    def _started(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self._took_s += time.perf_counter() - self._began_s
        self._programs += 1

    def _leave(self, handler: Any) -> None:
        if self._started in handler.start_callbacks:  # `torch._dynamo.reset` has taken all of them off
            handler.remove_start_callback(self._started)
            handler.remove_end_callback(self._ended)


def _unsaid(sentence: str) -> None:
    """Rank 0 says it."""


def layer_norms(run: Run) -> LayerNorms | None:
    """Of what the ranks in lock-step sum; None unless the run file asks for it."""
    every, sizes = run.run_file.observe.layer_norms_every_steps, run.generation.parts.split.trained_sizes
    if every == 0:
        return None
    return LayerNorms(run.generation.gradients, run.step.lockstep, sizes, every=every, device=run.device)


def scaling(run: Run) -> Scaling | None:
    """Rank 0's comparison with the run that `observe.one_rank` names. Raises `UsageError` where it cannot be made."""
    source = run.run_file.observe.one_rank
    if source is None or run.mesh.rank != 0:
        return None
    model = tomllib.loads(dumps(run.run_file))["model"]
    return Scaling(one_rank_rate(Path(source), model), run.mesh.layout.world_size)


def device_use(run: Run, directory: Path, sinks: Sinks) -> DeviceUse:
    """How well this rank's device is used. Looks at one of the next steps of `run.step`; rank 0 writes what it saw into
    the facts, and warns of attention that took the slow kernel.
    """
    first = run.mesh.rank == 0
    look = StepLook(compiled=run.run_file.run.compile is not False, warn=sinks.warn if first else _unsaid)
    peak, gpu = _peak(run), _own_gpu(run)
    run.step.counting = look.around(run.step.counting)
    if isinstance(run.step.context.forward_backward, SequentialForwardBackward):
        run.step.compute.announces.append(lambda _: look.microbatch())

    def told(work: StepOperations) -> None:
        if not first:
            return
        device = {"flops_of_step": work.hardware_flops, "peak_flops": peak.flops_s, "peak_from": peak.source}
        if gpu is not None and gpu.missing is not None:
            device["energy"] = gpu.missing
        write_facts(directory, {"attention": work.facts(), "device_use": device})
        for sentence in work.warnings(run.device.type):
            sinks.warn(sentence)

    return DeviceUse(lambda: look.found, peak, told=told, ranks=run.mesh.layout.world_size, gpu=gpu)


def _peak(run: Run) -> Peak:
    given = run.run_file.observe.peak_tflops
    if given is not None:
        return Peak(given * 1e12, "observe.peak_tflops")
    device = known_device(torch.cuda.get_device_name(run.device)) if run.device.type == "cuda" else None
    unknown = Peak(None, "not known of this device: set observe.peak_tflops")
    if device is None:
        return unknown
    rates: Mapping[str, float] = device.peak_tflops  # type: ignore[assignment]
    kind = arithmetic(run.run_file.precision.variant)
    if kind not in rates:
        return unknown
    return Peak(rates[kind] * 1e12, f"{device.name}, {kind}, dense: {device.source}")


def arithmetic(variant: str) -> str:
    """The type whose peak rate counts for a run of this precision, as the devices of `topology` name it."""
    kind = variant.removesuffix("_params")
    return "tfloat32" if kind == "float32" and _takes_tf32() else kind


def _takes_tf32() -> bool:
    """PyTorch has two ways to ask for TF32, and refuses to be asked by the older once a script has used the newer."""
    try:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"
    except (AttributeError, RuntimeError):
        return torch.get_float32_matmul_precision() != "highest"


def _own_gpu(run: Run) -> OwnGpu | None:
    if run.device.type != "cuda" or torch.version.cuda is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(run.device).uuid}"
    return OwnGpu(GpuUsage(), uuid, ranks=run.mesh.layout.world_size)
