"""The peer of `benchmarks.random_faults`: DDP under torchrun, saved every so many steps, resumed from the newest save.

    torchrun --max-restarts 100 -m benchmarks.random_faults_script FOLDER SAVE_EVERY TIMEOUT_S

It is written with care: a save counts by one rename, a start skips the samples of the steps that were saved, and a
collective that takes longer than TIMEOUT_S fails, so that a rank which stands still is noticed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.random_faults_job import BATCH, Numbers, Recording


def main(folder: Path, save_every: int, timeout_s: float) -> None:
    """Trains until it is ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    torch.manual_seed(0)
    bare = Recording()
    model = nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = folder / "newest.pt"
    if saved.exists():
        state = torch.load(saved)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for x, y in _batches(int(bare.step)):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if int(bare.step) % save_every == 0:
            _save(saved, {"model": bare.state_dict(), "optimizer": optimizer.state_dict()})


def _batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches from `step` on: `[batch, 2]` and `[batch]`."""
    data, own = Numbers(), BATCH // dist.get_world_size()
    order = list(DistributedSampler(data, shuffle=True, seed=0))  # type: ignore[arg-type]
    return iter(DataLoader(Subset(data, order[step * own :]), batch_size=own))  # type: ignore[arg-type]


def _save(path: Path, state: dict) -> None:
    if dist.get_rank() == 0:
        draft = path.with_suffix(".partial")
        torch.save(state, draft)
        os.replace(draft, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
