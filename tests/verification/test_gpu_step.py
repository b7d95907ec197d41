"""A step on a GPU, as the profiler sees it. The GPU is hidden from all tests but these: make gpu."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import DRY, Setting, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu"),
]
STEPS = 4
ROUNDING = 1e-2
"""Of losses in bfloat16, whose sums two programs may take in two orders."""
MOST_COPIES = 4
"""Of a step: inputs, targets and positions to the device; norm and loss back."""


def test_programs_that_are_launched_as_graphs_take_the_same_steps(tmp_path: Path) -> None:
    """A graph that reads memory of a step before would train, and say nothing."""
    losses = {}
    for mode in ("default", "reduce-overhead"):
        with ExitStack() as stack:
            setting = Setting(torch.device("cuda"), DRY, tmp_path, stack)
            step = trained(setting, mode, True, "bfloat16", "adamw", mode)
            losses[mode] = [step().loss for _ in range(4 * STEPS)]
    assert losses["reduce-overhead"] == pytest.approx(losses["default"], rel=ROUNDING)


def calls_a_step(folder: Path) -> Counter[str]:
    """How often a step of `shoal train` calls each function of CUDA's runtime."""
    with ExitStack() as stack:
        step = trained(Setting(torch.device("cuda"), DRY, folder, stack), "train", False, "bfloat16", "adamw")
        for _ in range(2 * STEPS):  # buffers are compared in the first steps
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                step()
    return Counter(
        {event.key: event.count // STEPS for event in profiler.key_averages() if event.key.startswith("cuda")}
    )


def test_the_host_never_waits_for_the_whole_stream(tmp_path: Path) -> None:
    """It waits for norm and loss alone, behind which the update is launched already; and copies next to nothing."""
    calls = calls_a_step(tmp_path)
    assert calls["cudaStreamSynchronize"] == 0, calls
    assert calls["cudaMemcpyAsync"] <= MOST_COPIES, calls
