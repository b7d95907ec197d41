"""Opening a group over NCCL, for tensors on GPUs.

Its works are of the device: `wait` returns at once, and holds up the stream of the caller. What takes longer than the
group's timeout ends the process (PyTorch's watchdog, SIGABRT).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.comm.board import GRACE_S, Board, bounded
from shoal.errors import CollectiveError


def open_nccl(store: Store, rank: int, size: int, timeout_s: float, *, device: torch.device | None = None) -> Any:
    """A group over NCCL, whose ranks find each other through `store`.

    Its kernels go before those of a backward that has filled the device (a stream of high priority); what takes longer
    than `timeout_s` is aborted. With the rank's `device` the ranks connect here, and not in their first call, so that a
    link that does not come up is an error of the start; None: in the first call, on the device of its tensor.

    Raises `CollectiveError` where they do not connect within `timeout_s`: NCCL itself may wait for ever.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_s)

    def opened() -> Any:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        if device is not None:
            group.eager_connect_single_device(device)
        return group

    board = Board(store, timeout_s=timeout_s)
    try:
        return bounded(opened, timeout_s=timeout_s + GRACE_S, look=lambda: board.published("given up"))
    except (RuntimeError, CollectiveError) as error:
        raise CollectiveError(
            f"rank {rank} of a group of {size} could not connect to the others over NCCL within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}): a rank has ended, or the network keeps them apart; NCCL_DEBUG=INFO shows "
            "what NCCL tries, and NCCL_SOCKET_IFNAME names the interface"
        ) from error


def gpu_identity(device: torch.device) -> str:
    """The same in every process for one GPU; empty where there is none to tell."""
    if device.type != "cuda" or torch.version.cuda is None:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
