"""One training script in the ways that people distribute it: Shoal's own loop, DDP by hand, and other libraries.

Model, data set, optimizer, loss and clipping are the same in all: those of a GPT on bytes, or of one of
`benchmarks.models_of_others`. Each function sets one library up as its documents say, and returns the body of the loop.
The libraries join PyTorch's default group, over Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models_of_others import Model, Samples
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import Run, open_run
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
    """Where a script runs: which rank it is, on which data, with how many `samples` of this rank in a step. `other` is
    what it trains in the place of the GPT.
    """

    place: Place
    store: Store
    stack: ExitStack
    folder: Path
    corpus: Path
    samples: int
    other: Model | None = None

    def new_model(self) -> nn.Module:
        """The same weights on every side."""
        return new_gpt() if self.other is None else self.other.new()

    def data(self) -> Sequences | Samples:
        """What the sides train on."""
        return Sequences(self.corpus) if self.other is None else Samples(self.other.draw)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the batch."""
        return loss_of(model, batch) if self.other is None else self.other.loss(model, batch)

    def run_file(self, folder: Path, *, zero: int | None = None) -> RunFile:
        """The run of a side of Shoal's, whose folder is made here, replicated or under a stage of ZeRO."""
        folder.mkdir()
        ranks, given = self.place.world_size, {"kind": "python", "build": GIVEN}
        norms = {"batch_norm": "grouped", "group_samples": self.samples}
        grouped = norms if ranks > 1 and self.other is not None and self.other.batch_norm else {}
        run = {"name": "bench", "steps": ENDLESS, "directory": str(folder), "device": "cpu", "processes": ranks}
        tables = {
            "run": run,
            "model": given | grouped,
            "data": given,
            "batch": {"global_samples": self.samples * ranks},
            "layout": {"replicate": ranks} if zero is None else {"shard": ranks},
            "memory": {} if zero is None else {"zero": zero},
            "optimizer": {"kind": "adamw", "lr": LR, "clip_norm": CLIP_NORM},
            "wire": {"timeout_s": 600.0},
            "checkpoint": {"every_steps": 0},
        }
        return msgspec.convert(tables, RunFile)


def own_loop(setting: Setting, *, zero: int | None = None) -> Step:
    """The loop of `shoal.start`, replicated or under a stage of ZeRO."""
    place, name = setting.place, f"own_loop_{zero}"
    folder, model = setting.folder / name, setting.new_model()
    optimizer = adamw(model)
    objects = UserObjects(model=model, data=(AsInputs(setting.data()), None), optimizers=[optimizer])
    run = open_run(setting.run_file(folder, zero=zero), place, objects, store=PrefixStore(name, setting.store))
    setting.stack.callback(run.generation.gradients.close)
    feed = setting.stack.enter_context(run.feed())
    job = training_job(Training(run, feed), folder, setting.stack)
    loop = OwnLoop(run, replace(job, rate=lambda number: None), ExitStack())
    batches = loop.batches()

    def step() -> float:
        loss = setting.loss(model, next(batches))
        loop.backward(loss)
        loop.clip_grad_norm_(CLIP_NORM)
        optimizer.step()
        return float(loss.detach())

    return by_itself(step, run, setting.stack)


def by_itself(step: Step, run: Run, stack: ExitStack) -> Step:
    """`step` of a loop that waits between two steps without the mode that keys its draws, which is there from one batch
    to the next, and would hold up whatever else this thread does. `stack` leaves it for good.
    """
    away, draws = ExitStack(), run.step.compute.randomness.draws
    stack.callback(lambda: draws is not None and draws.in_loop and draws.leave_loop())
    stack.callback(away.close)

    def alone() -> float:
        away.close()
        loss = step()
        away.enter_context(run.step.compute.randomness.beside_loop())
        return loss

    return alone


def ddp(setting: Setting) -> Step:
    """PyTorch's DistributedDataParallel."""
    model = setting.new_model()
    return _plain_loop(setting, model, nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp2(setting: Setting) -> Step:
    """PyTorch's `fully_shard` over all ranks, a unit for each entry of the model's lists of modules."""
    mesh, model = init_device_mesh("cpu", (setting.place.world_size,)), setting.new_model()
    for unit in [each for held in model.modules() if isinstance(held, nn.ModuleList) for each in held]:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_loop(setting, model, model)


def plain(setting: Setting) -> Step:
    """The loop of one process, on this rank's samples: no gradient is sent."""
    model = setting.new_model()
    return _plain_loop(setting, model, model)


def accelerate(setting: Setting) -> Step:
    """Hugging Face's Accelerate, which wraps the model by DDP."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    own = setting.new_model()
    loader = DataLoader(setting.data(), batch_size=setting.samples, shuffle=True)
    model, optimizer, loader = accelerator.prepare(own, adamw(own), loader)
    batches = endless(loader)

    def step() -> float:
        loss = setting.loss(model, next(batches))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def fabric(setting: Setting) -> Step:
    """Lightning's Fabric, with its strategy for DDP."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy

    strategy = DDPStrategy(
        cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo", gradient_as_bucket_view=True
    )
    lightning = Fabric(accelerator="cpu", devices=setting.place.world_size, strategy=strategy)
    lightning.launch()
    own = setting.new_model()
    model, optimizer = lightning.setup(own, adamw(own))
    loader = DataLoader(setting.data(), batch_size=setting.samples, shuffle=True)
    given: Any = lightning.setup_dataloaders(loader)
    batches = endless(given)

    def step() -> float:
        loss = setting.loss(model, next(batches))
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
    model = setting.new_model()
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
        loss = setting.loss(engine, next(batches))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _plain_loop(setting: Setting, model: nn.Module, called: nn.Module) -> Step:
    """PyTorch's loop, which calls `called` and trains `model`."""
    optimizer, parameters = adamw(model), [p for p in model.parameters() if p.requires_grad]
    batches = endless(_divided_loader(setting))

    def step() -> float:
        loss = setting.loss(called, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The script's optimizer, with weight decay for matrices."""
    return torch.optim.AdamW(decay_groups(model), lr=LR, betas=(0.9, 0.95), fused=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def endless(loader: DataLoader) -> Iterator[Any]:
    """One epoch after the other."""
    while True:
        yield from loader


def _divided_loader(setting: Setting) -> DataLoader:
    data, place = setting.data(), setting.place
    sampler = DistributedSampler(data, place.world_size, place.rank)
    return DataLoader(data, batch_size=setting.samples, sampler=sampler)
