"""The measurements of a step, under the names that `docs/reference/measurements.md` lists."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

import torch

from shoal.comm.ledger import Entry
from shoal.engine.state import Progress
from shoal.engine.step_result import StepResult
from shoal.models.mixture import Mixture, expert_loads, load_figures


def measurements(
    result: StepResult,
    progress: Progress,
    mixtures: Sequence[Mixture],
    *,
    lr: float,
    data_s: float,
    step_s: float,
    stall_s: float,
    device: torch.device,
    with_loads: bool = False,
) -> dict[str, float]:
    """One number a name. Times are this rank's; loss, norm and counts are the whole run's.

    `with_loads`: the load of every expert too, which may be thousands of numbers.
    """
    times, tally = result.times, result.tally
    values = {
        "loss/train": result.loss,
        "lr": lr,
        "grad/norm": result.norm,
        "samples/consumed": progress.samples,
        "time/step": step_s,
        "time/data": data_s,
        "time/forward_backward": times.forward_backward_s,
        "time/sync_exposed": times.sync_exposed_s,
        "time/optimizer": times.optimizer_s,
        "time/checkpoint_stall": stall_s,
        "wire/bytes_sent": result.bytes_sent,
        **wire_figures(result.wire),
        "memory/peak_bytes": peak_bytes(device),
        "throughput/samples_per_second": tally.samples / step_s,
        "steps/skipped": progress.skipped,
    }
    values |= load_figures(mixtures) | (expert_loads(mixtures) if with_loads else {})
    values |= result.noise.values() if result.noise is not None else {}
    if tally.tokens:
        values |= {"tokens/consumed": progress.tokens, "throughput/tokens_per_second": tally.tokens / step_s}
    return values


def wire_figures(wire: Mapping[str, Entry]) -> dict[str, float]:
    """Bytes by link level, and for each collective its bytes and the seconds exposed and hidden."""
    figures: dict[str, float] = {
        "wire/inside_bytes": sum(entry.inside_bytes for entry in wire.values()),
        "wire/between_bytes": sum(entry.between_bytes for entry in wire.values()),
    }
    for operation, entry in wire.items():
        figures[f"wire/{operation}/bytes_sent"] = entry.bytes_sent
        figures[f"wire/{operation}/exposed_s"] = entry.exposed_s
        figures[f"wire/{operation}/hidden_s"] = entry.hidden_s
    return figures


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held: allocated on the GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
