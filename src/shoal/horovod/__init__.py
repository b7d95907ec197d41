"""Horovod's names for PyTorch, over Shoal: a script of Horovod's runs with one changed line.

    import shoal.horovod as hvd          # instead of: import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Start it with `shoal launch -n 4 script.py`, torchrun, srun or mpiexec. What is here and what is not: docs/horovod.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from shoal.horovod import elastic
from shoal.horovod.engine import Handle, HorovodInternalError
from shoal.horovod.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    SyncBatchNorm,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from shoal.horovod.optimizer import (
    DistributedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
    sparse_allreduce_async,
)
from shoal.horovod.process import ProcessSet, process
from shoal.horovod.values import Compression

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]  # fmt: skip


global_process_set = ProcessSet()
"""All ranks."""


def init(process_sets: Sequence[ProcessSet] = ()) -> None:
    """Meets the other ranks of the launcher, and adds `process_sets`, which all ranks give alike.

    Raises `EnvironmentFault` and `CollectiveError` where ranks do not come.
    """
    process().init()
    for each in process_sets:
        process().add_set(each)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a set of ranks; all ranks call it, those outside of the set, too. Raises `UsageError`."""
    return process().add_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a set out again; all ranks call it. False where there is no such set."""
    return process().remove_set(process_set)


def shutdown() -> None:
    """Ends the connection to the other ranks."""
    process().shutdown()


def is_initialized() -> bool:
    """Between `init` and `shutdown`."""
    return process().initialized


def rank() -> int:
    """This process among all."""
    return process().there().rank


def size() -> int:
    """How many processes there are."""
    return process().there().world_size


def local_rank() -> int:
    """This process among those of its host: the GPU to take."""
    return process().there().local_rank


def local_size() -> int:
    """How many processes this host has."""
    return process().there().local_world_size


def cross_rank() -> int:
    """This host among the hosts."""
    return process().there().node_rank


def cross_size() -> int:
    """How many hosts there are."""
    return -(-size() // local_size())


def is_homogeneous() -> bool:
    """Whether all hosts have as many processes."""
    return size() % local_size() == 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes what happens to each tensor to `file_path`, for chrome://tracing or Perfetto; see HOROVOD_TIMELINE."""
    process().timeline.start(Path(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Completes the file of `start_timeline`."""
    process().timeline.stop()


_ELSEWHERE = {
    "run": "start the ranks with `shoal launch -n 4 script.py`",
    "mpi_ops": "its functions are in shoal.horovod itself",
    "tensorflow": "use shoal.keras",
    "keras": "use shoal.keras",
}


def __getattr__(name: str) -> NoReturn:
    instead = _ELSEWHERE.get(name, "docs/horovod.md has a table of what there is, and what stands in for the rest")
    raise AttributeError(f"shoal.horovod has no {name!r}: {instead}")


def nccl_built() -> bool:
    """Whether tensors on GPUs can be exchanged by NCCL."""
    return torch.distributed.is_nccl_available() and torch.cuda.is_available()


def cuda_built() -> bool:
    """Whether torch knows CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch knows ROCm."""
    return torch.version.hip is not None


def gloo_built() -> bool:
    """True: what Horovod does over Gloo is done by `shoal.wire`."""
    return True


def gloo_enabled() -> bool:
    """See `gloo_built`."""
    return True


def mpi_built() -> bool:
    """False: no call goes over MPI, also under mpiexec."""
    return False


def mpi_enabled() -> bool:
    """See `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """See `mpi_built`."""
    return False


def ccl_built() -> bool:
    """See `mpi_built`: no call goes over oneCCL."""
    return False


def ddl_built() -> bool:
    """See `mpi_built`: no call goes over IBM's DDL."""
    return False
