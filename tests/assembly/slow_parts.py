"""A user's model and data in which one thing is slow, as asked; and a rank that something keeps from its core."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

WIDTH = 256
_STOP_AND_GO = """
import os, signal, sys, time
pid = int(sys.argv[1])
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.018)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.002)
finally:
    os.kill(pid, signal.SIGCONT)
"""


class Samples:
    """Random vectors; `read_s` seconds to read one on rank `rank` (None: on all)."""

    def __init__(self, read_s: float, rank: int | None) -> None:
        self.inputs = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
        self.read_s = read_s if rank in (None, int(os.environ.get("PLANTED_RANK", "0"))) else 0.0

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.read_s:
            time.sleep(self.read_s)
        return self.inputs[index], torch.tensor(index % 10)


class Layers(nn.Module):
    """Wide linear layers; with `sorts`, an operator that sorts far more than the model needs."""

    def __init__(self, sorts: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 10))
        self.sorts = sorts

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.sorts):
            x = x + 0 * torch.sort(x.detach().repeat(1, 8))[0][:, :WIDTH]
        return self.layers(x)


def data(read_s: float = 0.0, rank: int | None = None) -> Samples:
    return Samples(read_s, rank)


def model(sorts: int = 0) -> nn.Module:
    torch.manual_seed(1)
    return Layers(sorts)


@contextlib.contextmanager
def kept_from_its_core() -> Iterator[None]:
    """This process is stopped nine tenths of the time, as a container's limit does it."""
    child = subprocess.Popen([sys.executable, "-S", "-c", _STOP_AND_GO, str(os.getpid())])
    try:
        yield
    finally:
        child.terminate()
        child.wait()
        os.kill(os.getpid(), 18)
