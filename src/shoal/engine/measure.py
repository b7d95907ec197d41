"""The measurements of a step, under the names that `docs/reference/measurements.md` lists."""

from __future__ import annotations

import resource

import torch

from shoal.engine.state import TrainState
from shoal.engine.step import StepResult
from shoal.models.mixture import load_figures


def measurements(
    result: StepResult,
    state: TrainState,
    *,
    lr: float,
    data_s: float,
    step_s: float,
    stall_s: float,
    device: torch.device,
) -> dict[str, float]:
    """One number a name. Times are this rank's; loss, norm and counts are the whole run's."""
    times, tally = result.times, result.tally
    values = {
        "loss/train": result.loss,
        "lr": lr,
        "grad/norm": result.norm,
        "samples/consumed": state.samples,
        "time/step": step_s,
        "time/data": data_s,
        "time/forward_backward": times.forward_backward_s,
        "time/sync_exposed": times.sync_exposed_s,
        "time/optimizer": times.optimizer_s,
        "time/checkpoint_stall": stall_s,
        "wire/bytes_sent": result.bytes_sent,
        "memory/peak_bytes": peak_bytes(device),
        "throughput/samples_per_second": tally.samples / step_s,
        "steps/skipped": state.skipped,
    }
    values |= load_figures(state.model)
    if tally.tokens:
        values |= {"tokens/consumed": state.tokens, "throughput/tokens_per_second": tally.tokens / step_s}
    return values


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held: allocated on the GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
