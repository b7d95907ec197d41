"""The ledger of a simulated device beside PyTorch's own account, and what it refuses."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.shm.host import window_name
from shoal.errors import OutOfMemory
from shoal.memory.simulated_device import SimulatedDevice
from shoal.memory.tracker import allocated

# In-place and fused operators have temporaries of their own, which the profiler sees and the ledger does not.
TEMPORARIES = 0.02


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(3)))


@pytest.mark.slow
def test_the_peak_is_that_of_the_allocator() -> None:
    """Of a forward and a backward of PyTorch's own layers, with all that they save."""
    own, x, device = model(), torch.randn(8, 50, 64), SimulatedDevice(None)

    def step() -> None:
        own(x).square().sum().backward()
        for parameter in own.parameters():
            parameter.grad = None

    step()
    device.take_peak()
    at_rest = device.live_bytes
    measured = allocated(step).peak_bytes
    with device.counting():
        step()
    assert device.take_peak() - at_rest == pytest.approx(measured, rel=TEMPORARIES)
    gc.collect()
    assert device.live_bytes == at_rest


def test_what_does_not_fit_is_refused_with_what_holds_most() -> None:
    own, x = model(), torch.randn(8, 50, 64)
    device = SimulatedDevice(None)
    device.holders = lambda: {"parameters": own.parameters(), "gradients": []}
    device.advice = {"gradients": "another", "parameters": "a key"}  # of what there is none, nothing can be freed
    device.hold(own.parameters())
    own_bytes = sum(p.nbytes for p in own.parameters())
    device.limit_bytes = device.live_bytes + (1 << 19)
    with device.counting(), pytest.raises(OutOfMemory, match=r"is short by .* in aten.*parameters; a key frees"):
        own(x)
    assert device.by_holder()["parameters"] == own_bytes
    device.limit_bytes = device.live_bytes
    with device.counting():
        next(own.parameters())[:2].detach().mul_(1.0)  # a view makes nothing


def test_the_hosts_memory_does_not_count_and_what_is_emptied_neither() -> None:
    device = SimulatedDevice(None)
    with device.building():
        kept = torch.zeros(1 << 16)
    at_rest = device.live_bytes
    elsewhere = torch.ones(1 << 16)
    with device.counting():
        elsewhere.view(256, 256).mul_(2.0)
        assert device.live_bytes == at_rest
        kept.untyped_storage().resize_(0)
        assert device.live_bytes == at_rest - (4 << 16)


def window(size_bytes: int) -> Tensor:
    """Memory as a group of ranks gives it out for tensors; it goes with the last tensor in it."""
    descriptor = os.memfd_create(window_name())
    os.ftruncate(descriptor, size_bytes)
    with os.fdopen(descriptor) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.uint8)


def now_bytes(device: SimulatedDevice) -> int:
    """When the next forward begins."""
    with device.counting():
        return device.live_bytes


def test_windows_that_end_do_not_hide_later_ones() -> None:
    """Of an earlier run in this process, and those in which parameters of this one lay, as of an earlier generation."""
    page = mmap.PAGESIZE
    earlier = window(4 * page)
    device = SimulatedDevice(None)
    assert now_bytes(device) == 0
    held, messages = window(8 * page), window(page)
    device.hold([held])
    assert (now_bytes(device), device.by_holder()["windows of messages"]) == (9 * page, page)
    del earlier, held
    assert now_bytes(device) == page
    later = window(16 * page)
    assert now_bytes(device) == later.nbytes + messages.nbytes
