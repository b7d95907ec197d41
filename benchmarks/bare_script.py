"""The peer of `benchmarks.start`: the first step of a small GPT under torchrun. It writes down when the step ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.models.build import build
from shoal.models.config import GPTConfig


def main(done: Path) -> None:
    """One step of DDP on random tokens."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(build(GPTConfig(width=128, layers=4, heads=4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, 256, (8, 129))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        done.write_text(str(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
