"""A step of the run's own model, tried for two seconds on this machine's cores, where nothing else was measured here.

The rates of CPU cores are on no data sheet, and differ several times. So a rank's part of the step is computed here:
forward and backward of one microbatch, with as many threads as a rank has, and AdamW's update. The fastest step counts,
by the processor's time where there is one thread: what other programs take of a core is not the machine's. Like a step
of an earlier run (`planning.measured_step`), it calibrates the prediction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shoal.cost.transformer import total_parameters
from shoal.launcher.devices import cores
from shoal.models.config import GPTConfig
from shoal.optim.config import AdamW
from shoal.planning.answer import cluster_of, transformer_of, workload_of
from shoal.planning.calibration import calibration_here, measured_for_traces, measured_here
from shoal.planning.measured_step import MeasuredStep
from shoal.planning.plan_file import written_plan
from shoal.runfile.run_file import RunFile
from shoal.topology.config import LayoutConfig

if TYPE_CHECKING:
    from shoal.data.sample import Batch

TRIED_S = 2.0
LONGEST_S = 0.5
"""A microbatch that takes longer is tried with fewer samples."""
FEWEST_STEPS = 2
MOST_PARAMETERS = 50_000_000
"""Larger models are not built for it."""


def tried_step(
    run_file: RunFile, environ: Mapping[str, str] = os.environ, *, tried_s: float = TRIED_S
) -> MeasuredStep | None:
    """None where operators were measured here, for GPUs, for more ranks than cores and for large models.

    Raises `ShoalError` for data or code of the user's that fails.
    """
    processes = cluster_of(run_file, None).devices if run_file.run.device != "cuda" else cores() + 1
    simulated = isinstance(run_file.model, GPTConfig)
    measured = (measured_here if simulated else measured_for_traces)(run_file, calibration_here(environ))
    if measured is not None or processes > cores() or _parameters(run_file) > MOST_PARAMETERS:
        return None
    samples = written_plan(run_file, cluster_of(run_file, None)).microbatch
    samples, step_s = _measured(run_file, samples, threads=max(1, cores() // processes), tried_s=tried_s)
    return MeasuredStep(run_file=_alone(run_file, samples), step_s=step_s, tried=True)


def _alone(run_file: RunFile, samples: int) -> RunFile:
    """One rank that takes one microbatch of `samples` a step, by AdamW."""
    return msgspec.structs.replace(
        run_file,
        run=msgspec.structs.replace(run_file.run, processes=1),
        batch=msgspec.structs.replace(run_file.batch, global_samples=samples, micro_samples=samples),
        optimizer=AdamW(),
        layout=LayoutConfig(),
        memory=msgspec.structs.replace(run_file.memory, zero=None),
    )


def _parameters(run_file: RunFile) -> int:
    if isinstance(run_file.model, GPTConfig):
        return int(total_parameters(transformer_of(run_file.model)))
    from shoal.planning.tracing import subject_of

    return sum(parameter.numel() for parameter in subject_of(run_file)[0].model.parameters())


def _measured(run_file: RunFile, samples: int, *, threads: int, tried_s: float) -> tuple[int, float]:
    """The samples of a microbatch that was tried, and the seconds of its fastest step."""
    import torch

    clock = time.process_time if threads == 1 else time.perf_counter
    before, generator = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(threads)
    try:
        step = _step(run_file)
        one_s = min(_timed(lambda: step(1), clock) for _ in range(FEWEST_STEPS))
        samples = max(1, min(samples, int(LONGEST_S / one_s)))
        step(samples)
        until_s, found = time.perf_counter() + tried_s, []
        while len(found) < FEWEST_STEPS or time.perf_counter() < until_s:
            found.append(_timed(lambda: step(samples), clock))
        return samples, min(found)
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(generator)


def _timed(work: Callable[[], None], clock: Callable[[], float]) -> float:
    begin_s = clock()
    work()
    return clock() - begin_s


def _step(run_file: RunFile) -> Callable[[int], None]:
    """Computes a step of so many samples."""
    import torch

    from shoal.assembly.objects import UserObjects, loss_of
    from shoal.engine.compute import Compute
    from shoal.engine.loss import weighted_sum
    from shoal.engine.precision import precision_of
    from shoal.engine.randomness import Randomness
    from shoal.planning.tracing import model_of

    precision = precision_of(run_file.precision)
    model = model_of(run_file).to(precision.parameters)
    loss = loss_of(run_file.loss, UserObjects(), precision)
    compute = Compute(model, loss, precision, torch.device("cpu"), Randomness(model, seed=0, replica=0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, fused=True)
    batch_of = _batches(run_file)

    def step(samples: int) -> None:
        microbatch = compute.prepared(batch_of(samples))
        compute.announce(microbatch, lambda: 1.0)
        weighted_sum(compute.losses(microbatch.batch)[1], microbatch.weights).backward()
        optimizer.step()
        optimizer.zero_grad()

    compute.train()
    return step


def _batches(run_file: RunFile) -> Callable[[int], Batch]:
    """Batches of so many samples: random tokens for a GPT, whose data a plan does not need, else the run's own."""
    import torch

    from shoal.assembly.objects import UserObjects, data_of
    from shoal.data.collate import collate

    denominator = run_file.batch.denominator
    if isinstance(run_file.model, GPTConfig):
        shape = workload_of(run_file).sequence + 1
        numbers = torch.Generator().manual_seed(0)
        tokens = torch.randint(run_file.model.vocabulary, (shape,), generator=numbers)
        data = [(tokens[:-1], tokens[1:])]
    else:
        data = data_of(run_file, UserObjects(), os.environ).train
    length = len(data)

    def batch(samples: int) -> Batch:
        return collate([data[n % length] for n in range(samples)], np.arange(samples), denominator=denominator)

    return batch
