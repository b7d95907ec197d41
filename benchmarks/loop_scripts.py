"""One training script in the ways that people distribute it: Shoal's own loop, DDP by hand, and other libraries.

Model, data set, optimizer, loss and clipping are the same in all. Each function sets one library up as its documents
say, and returns the body of the loop. The libraries join PyTorch's default group, over Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils.data import DataLoader, DistributedSampler

from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.bench.ddp_script import decay_groups, new_gpt
from shoal.bench.training_job import ENDLESS, LR, SEQUENCE, Training, training_job
from shoal.config.named import GIVEN
from shoal.data.inputs import AsInputs
from shoal.launcher.environment import Place
from shoal.own_loop.loop import Training as OwnLoop
from shoal.runfile.run_file import RunFile

CLIP_NORM = 1.0
Step = Callable[[], float]
"""Makes one update and returns the loss."""


class Sequences(torch.utils.data.Dataset):
    """Neighbouring pieces of a file of bytes, `[sequence + 1]` int64 each."""

    def __init__(self, corpus: Path) -> None:
        self.data = np.memmap(corpus, dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return (len(self.data) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> Tensor:
        piece = self.data[index * SEQUENCE : (index + 1) * SEQUENCE + 1]
        return torch.from_numpy(piece.astype(np.int64))


@dataclass(frozen=True)
class Setting:
    """Where a script runs: which rank it is, on which data, with how many `samples` of this rank in a step."""

    place: Place
    store: Store
    stack: ExitStack
    folder: Path
    corpus: Path
    samples: int


def own_loop(setting: Setting, *, zero: int | None = None) -> Step:
    """The loop of `shoal.start`, replicated or under a stage of ZeRO."""
    place, name = setting.place, f"own_loop_{zero}"
    (folder := setting.folder / name).mkdir()
    model = new_gpt()
    optimizer = adamw(model)
    run = open_run(
        _run_file(folder, setting, zero=zero),
        place,
        UserObjects(model=model, data=(AsInputs(Sequences(setting.corpus)), None), optimizers=[optimizer]),
        store=PrefixStore(name, setting.store),
    )
    setting.stack.callback(run.generation.gradients.close)
    feed = setting.stack.enter_context(run.feed())
    job = training_job(Training(run, feed), folder, setting.stack)
    loop = OwnLoop(run, replace(job, rate=lambda number: None), ExitStack())
    batches = loop.batches()

    def step() -> float:
        loss = loss_of(model, next(batches))
        loop.backward(loss)
        loop.clip_grad_norm_(CLIP_NORM)
        optimizer.step()
        return float(loss.detach())

    return step


def ddp(setting: Setting) -> Step:
    """PyTorch's DistributedDataParallel."""
    model = new_gpt()
    optimizer, parameters = adamw(model), list(model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    batches = endless(_divided_loader(setting))

    def step() -> float:
        loss = loss_of(wrapped, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def accelerate(setting: Setting) -> Step:
    """Hugging Face's Accelerate, which wraps the model by DDP."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    own = new_gpt()
    loader = DataLoader(Sequences(setting.corpus), batch_size=setting.samples, shuffle=True)
    model, optimizer, loader = accelerator.prepare(own, adamw(own), loader)
    batches = endless(loader)

    def step() -> float:
        loss = loss_of(model, next(batches))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def fabric(setting: Setting) -> Step:
    """Lightning's Fabric, with its strategy for DDP."""
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]
    from lightning_fabric.plugins.environments import TorchElasticEnvironment  # pyright: ignore[reportMissingImports]
    from lightning_fabric.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]

    strategy = DDPStrategy(
        cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo", gradient_as_bucket_view=True
    )
    lightning = Fabric(accelerator="cpu", devices=setting.place.world_size, strategy=strategy)
    lightning.launch()
    own = new_gpt()
    model, optimizer = lightning.setup(own, adamw(own))
    loader = DataLoader(Sequences(setting.corpus), batch_size=setting.samples, shuffle=True)
    batches = endless(lightning.setup_dataloaders(loader))

    def step() -> float:
        loss = loss_of(model, next(batches))
        lightning.backward(loss)
        lightning.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def deepspeed(setting: Setting, *, stage: int) -> Step:
    """DeepSpeed's engine under a stage of ZeRO, with the script's optimizer."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = new_gpt()
    config = {
        "train_micro_batch_size_per_gpu": setting.samples,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": ENDLESS,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    batches = endless(_divided_loader(setting))

    def step() -> float:
        loss = loss_of(engine, next(batches))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The script's optimizer, with weight decay for matrices."""
    return torch.optim.AdamW(decay_groups(model), lr=LR, betas=(0.9, 0.95), fused=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def endless(loader: DataLoader) -> Iterator[Tensor]:
    """One epoch after the other."""
    while True:
        yield from loader


def _divided_loader(setting: Setting) -> DataLoader:
    data, place = Sequences(setting.corpus), setting.place
    sampler = DistributedSampler(data, place.world_size, place.rank)
    return DataLoader(data, batch_size=setting.samples, sampler=sampler)


def _run_file(folder: Path, setting: Setting, *, zero: int | None) -> RunFile:
    ranks = setting.place.world_size
    given = {"kind": "python", "build": GIVEN}
    return msgspec.convert(
        {
            "run": {"name": "bench", "steps": ENDLESS, "directory": str(folder), "device": "cpu", "processes": ranks},
            "model": given,
            "data": given,
            "batch": {"global_samples": setting.samples * ranks},
            "layout": {"replicate": ranks} if zero is None else {"shard": ranks},
            "memory": {} if zero is None else {"zero": zero},
            "wire": {"timeout_s": 600.0},
            "checkpoint": {"every_steps": 0},
        },
        RunFile,
    )
