"""The default process group of `torch.distributed` in the ranks of a run, for what a user's code says to all of them.

    torch.distributed.all_reduce(right)          # in a loop of `shoal.start`, in a hook or a loss of `shoal.train`
    if torch.distributed.get_rank() == 0: ...

Metrics, loggers and most scripts ask the default group who is there. It holds all ranks of the run, numbered as the
run numbers them; in a script's own loop under `layout.tensor` those that see other samples. It carries nothing of
Shoal's own: a call that one rank leaves out is a hang of this group, with its verdict, and never takes a message that
was meant for a gradient. Its calls go through the seam, so they are in the ledger. `torch.distributed.new_group` opens
more groups of the same kind.

c10d asks the backend's creator for a group and passes on what `init_process_group` was given as options: the members.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.c10d_forms import untraced
from shoal.comm.mesh import Mesh
from shoal.comm.seam import Seam
from shoal.errors import UserCodeError

BACKEND = "shoal_run"
LANE = "torch.distributed"
_TWICE = "initialize the default process group twice"


@contextmanager
def default_group(mesh: Mesh, *, store: Store, timeout_s: float, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Within it, the default process group is that of all ranks of `mesh`, or of those `ranks` of it, numbered in their
    order. Every rank opens it, in the same place.

    Does nothing in a process that has a default group already. Raises `UserCodeError` where the user's code calls
    `init_process_group` within.
    """
    if dist.is_initialized():
        yield
        return
    members = _Members(mesh, tuple(range(mesh.layout.world_size) if ranks is None else ranks))
    excepthook = sys.excepthook
    dist.init_process_group(
        BACKEND,
        store=PrefixStore(f"{LANE}/{mesh.generation}/{members.ranks[0]}", store),  # for groups of other backends
        rank=members.ranks.index(mesh.rank),
        world_size=len(members.ranks),
        timeout=timedelta(seconds=timeout_s),
        pg_options=members,
    )
    sys.excepthook = excepthook  # that of c10d holds back what a failing rank says
    group = dist.group.WORLD
    try:
        yield
    except BaseException as error:
        if isinstance(group, Seam):
            group.abort()  # another rank may be gone
        if isinstance(error, ValueError) and _TWICE in str(error):
            raise UserCodeError(
                "torch.distributed.init_process_group was called in a rank of Shoal, which has connected the ranks: "
                "remove the call, and destroy_process_group; get_rank(), all_reduce() and the others work without it"
            ) from error
        raise
    finally:
        if dist.is_initialized() and dist.group.WORLD is group:  # the script may have destroyed it
            dist.destroy_process_group()


class _Members(NamedTuple):
    """The ranks of the default group, by their numbers in it."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def open(self, numbers: Sequence[int], lane: str) -> Seam:
        """The group of those of them."""
        group = self.mesh.process_group([self.ranks[number] for number in numbers], lane=lane)
        group.opener = self.open
        return group


@untraced
def create_group(options: Any, members: _Members | None) -> Seam:
    """The group of one rank, in the form that c10d asks of a backend. `members` is None for groups of `new_group`.

    Blocks until all its ranks have called this.
    """
    default = dist.group.WORLD
    if members is not None:
        return members.open(range(options.group_size), LANE)
    if not isinstance(default, Seam) or default.opener is None:
        raise UserCodeError(f'the backend "{BACKEND}" is that of a run of Shoal; name "shoal" or "gloo" outside of one')
    return default.opener(options.global_ranks_in_group, f"{LANE}-{options.group_id}")


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu", "cuda"])
