"""NCCL, in a world of one rank: every call that Shoal makes of it. Groups of several ranks take a GPU each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shoal.comm.collective import GroupCollective
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.comm.nccl import open_nccl
from shoal.errors import CollectiveError

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


@contextmanager
def group_of_one() -> Iterator[GroupCollective]:
    device = torch.device("cuda", 0)
    group = connect(dist.HashStore(), 0, 1, device=device, label="one", ledger=Ledger(), wire=WireConfig())
    try:
        yield group
    finally:
        group.group.abort()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_call_gives_what_one_rank_has(dtype: torch.dtype) -> None:
    """In all types that are sent, and with a barrier that finds the device."""
    with group_of_one() as group:
        assert group.wire == "nccl: GPUs"
        x = torch.arange(8, device="cuda").to(dtype)
        found = {name: torch.zeros_like(x) for name in ("reduce_scatter", "all_gather", "all_to_all", "uneven")}
        group.reduce_scatter(found["reduce_scatter"], x).wait()
        group.all_gather(found["all_gather"], x).wait()
        group.all_to_all(found["all_to_all"], x).wait()
        group.all_to_all(found["uneven"], x, output_sizes=[8], input_sizes=[8]).wait()
        for op in ("sum", "max", "min"):
            found[op] = x.clone()
            group.all_reduce(found[op], op).wait()
        found["broadcast"], found["reduce"] = x.clone(), x.clone()
        group.broadcast(found["broadcast"]).wait()
        group.reduce(found["reduce"]).wait()
        group.barrier().wait()
        assert {name: torch.equal(each, x) for name, each in found.items()} == dict.fromkeys(found, True)


@pytest.mark.gpu
@on_a_gpu
def test_a_wait_is_of_the_stream() -> None:
    """Work that is over says so, and a second group stands beside the first."""
    with group_of_one() as group, group_of_one() as other:
        work = group.all_reduce(x := torch.ones(1 << 20, device="cuda"))
        other.all_reduce(y := torch.ones(4, device="cuda")).wait()
        work.wait()
        torch.cuda.synchronize()
        assert x.sum().item() == 1 << 20
        assert y.sum().item() == 4


class Unreachable:
    """In the place of `ProcessGroupNCCL`: a group whose ranks do not connect."""

    Options = staticmethod(lambda **given: SimpleNamespace(**given))

    def __init__(self, *_: object) -> None:
        """Nothing happens before the ranks connect."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        raise RuntimeError("ncclRemoteError: a peer has gone\nstack")


def test_ranks_that_do_not_connect_say_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Unreachable, raising=False)
    with pytest.raises(CollectiveError, match=r"over NCCL within 5 s \(ncclRemoteError: a peer has gone\).*NCCL_DEBUG"):
        open_nccl(dist.HashStore(), 0, 2, 5.0, device=torch.device("cuda", 0))
