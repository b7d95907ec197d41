"""`Process`: what a rank has for as long as its process lives, whatever becomes of the membership."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch._C._distributed_c10d import Store

from shoal.assembly.lab import conditions_from
from shoal.assembly.sameness import require_same_start
from shoal.comm.conditions import Conditions
from shoal.comm.default_group import default_group
from shoal.comm.mesh import Mesh
from shoal.engine.injection import Injector, injector_from
from shoal.errors import EnvironmentFault
from shoal.launcher.allocator import Thresholds, described, keep_freed_memory, thresholds
from shoal.launcher.devices import ONE_RANK_DEVICES, cores, memory_limit, too_few_gpus
from shoal.launcher.environment import Place
from shoal.launcher.rank_process import ALLOC_CONF
from shoal.launcher.rendezvous import STARTED, Rendezvous, interface_for, open_store
from shoal.launcher.supervision import say_arrived
from shoal.runfile.run_file import RunFile


@dataclass(frozen=True)
class Process:
    """One rank: its place among the others, its device, and the store where ranks meet.

    `rendezvous` bounds every wait of the start by `run.start_timeout_s`, and says who is missing.
    """

    place: Place
    device: torch.device
    store: Store
    rendezvous: Rendezvous
    environ: Mapping[str, str]

    def announce(self, key: str, find: Callable[[], str]) -> str:
        """What rank 0 finds, on every rank."""
        return self.rendezvous.announce(key, find)

    def first(self, key: str, text: str) -> str:
        """What the first rank said that came here: `text`, if it is this one. Waits for nobody."""
        return self.rendezvous.first(key, text)

    def wait_for_all(self) -> None:
        """Until every rank has built what it trains. A rank that failed before says why to the others here."""
        self.rendezvous.barrier(STARTED)

    def default_group(
        self, mesh: Mesh, run_file: RunFile, ranks: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """PyTorch's default process group on the ranks of `mesh`, or those `ranks` of it; none where some only serve
        and run no user's code.
        """
        if run_file.sync.serving_only:
            return nullcontext()
        return default_group(mesh, store=self.store, timeout_s=run_file.wire.timeout_s, ranks=ranks)

    @cached_property
    def injector(self) -> Injector | None:
        """What strikes this rank in a rehearsal; None everywhere else."""
        return injector_from(self.environ)

    @property
    def allocator(self) -> str:
        """How this rank's allocator is set, in a clause."""
        if self.device.type == "cpu":
            return described(_kept(self.place), self.environ)
        said = [f"{name}={self.environ[name]}" for name in sorted(ALLOC_CONF & self.environ.keys())]
        return " ".join(said) or "as PyTorch has it"

    @property
    def conditions(self) -> Conditions | None:
        """The rates that a throttled lab's ranks keep to, and a rehearsal's faults; None everywhere else."""
        found = conditions_from(self.environ)
        return found if self.injector is None else self.injector.conditions(found)


def open_process(
    run_file: RunFile, place: Place, *, environ: Mapping[str, str] = os.environ, store: Store | None = None
) -> Process:
    """Picks the device and opens the store, at the address that the launcher named if none is passed.

    Blocks until rank 0's process is there. Raises `EnvironmentFault` if GPUs were asked for and there are too few, and
    `ConfigError` on a rank that was started with other keys or versions than rank 0.
    """
    if place.launcher == "shoal":
        say_arrived(environ)
    device = settle(run_file, place, environ)
    if store is None:
        store = open_store(place, environ, timeout_s=run_file.run.start_timeout_s)
    rendezvous = Rendezvous(store, place, timeout_s=run_file.run.start_timeout_s)
    process = Process(place, device, store, rendezvous, environ)
    require_same_start(place.rank, process.announce, run_file)
    return process


def settle(run_file: RunFile, place: Place, environ: Mapping[str, str]) -> torch.device:
    """Takes this rank's device, network interface and number of threads, and keeps the memory that a step on the CPU
    frees for the next one. Raises as `device_of`.
    """
    device = device_of(run_file.run.device, place, shared=run_file.run.share_gpus)
    _share_host(place, environ)
    if device.type == "cpu":
        keep_freed_memory(_kept(place), environ)
    if run_file.sync.in_canonical_order:
        torch.set_num_threads(1)  # a matrix product adds in another order on another number of threads
    return device


def _kept(place: Place) -> Thresholds:
    memory = memory_limit()
    return thresholds(memory.total_bytes if memory else None, ranks=place.local_world_size)


def device_of(asked: str, place: Place, *, shared: bool = False) -> torch.device:
    """The device of this rank; `asked` is `run.device`. Raises `EnvironmentFault` if there are too few GPUs, unless
    ranks may have one `shared`.
    """
    if asked in ONE_RANK_DEVICES:
        return _other_accelerator(asked)
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if there == 1 and place.launcher == "slurm":  # it shows each task its own GPU alone
        return torch.device("cuda", 0)
    if place.local_rank >= there and not (shared and there):
        raise EnvironmentFault(too_few_gpus(place.local_world_size, there))
    torch.cuda.set_device(place.local_rank % there)
    return torch.device("cuda", place.local_rank % there)


def _other_accelerator(asked: str) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != asked:
        there = "no accelerator" if found is None else f'"{found.type}"'
        raise EnvironmentFault(
            f'run.device = "{asked}", and torch {torch.__version__} finds {there} here: install a build for it, or set '
            'run.device to "auto" or "cpu"'
        )
    return torch.device(asked, 0)


def _share_host(place: Place, environ: Mapping[str, str]) -> None:
    """Ranks of one host talk over loopback and share its cores: more threads than cores make every rank slower."""
    interface_for(place, os.environ)
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(max(1, cores() // place.local_world_size))
