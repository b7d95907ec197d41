"""Groups of real processes that choose their own backend: what they fall back to, and what a rank that dies leaves."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shoal.comm import mesh as connecting
from shoal.comm.conditions import Conditions, Fault
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.comm.shm import host
from shoal.comm.shm.core import CoreMissing
from shoal.errors import CollectiveError, EnvironmentFault
from tests.comm.groups import STOPPED_S, replicas
from tests.waiting import NEVER_S


def overlapping(place) -> list[float]:
    """Sums in the groups {0, 1}, {1, 2} and {0, 1, 2}, begun together by whoever is in them."""
    groups = {}
    for members in ((0, 1), (1, 2), (0, 1, 2)):
        if place.rank in members:
            named = dist.PrefixStore(str(members), place.store)
            groups[members] = connect(
                named,
                members.index(place.rank),
                len(members),
                device=torch.device("cpu"),
                label=str(members),
                ledger=Ledger(),
                wire=WireConfig(timeout_s=180),
            )
    tensors = {members: torch.full((100_000,), 10.0**place.rank) for members in groups}
    handles = [group.all_reduce(tensors[members]) for members, group in groups.items()]
    for handle in reversed(handles):
        handle.wait()
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors.values())
    return [float(tensor[0]) for tensor in tensors.values()]


def test_overlapping_groups_do_not_mix(ranks) -> None:
    """A rank in several groups at once gets each group's own sum."""
    assert ranks(3, overlapping) == [[11.0, 111.0], [11.0, 110.0, 111.0], [110.0, 111.0]]


def opened_again(place) -> str:
    """What a rank hears that opens its mesh in the same part of the store again."""
    replicas(place)
    with pytest.raises(CollectiveError) as refused:
        replicas(place)
    return str(refused.value)


def test_a_mesh_that_would_find_the_addresses_of_another_is_refused(ranks) -> None:
    """A rank that came first would else connect to a group that is complete, and both wait until their time is over."""
    for rank, said in enumerate(ranks(2, opened_again)):
        assert f"rank {rank} has opened group world" in said
        assert "a store or a generation of its own" in said


def errors_of(place, fault: Fault, timeout_s: float) -> tuple[str, str]:
    """The sentence of a survivor, and that of its next call, through the seam; rank 1 has the fault."""
    conditions = Conditions(faults=[fault]) if place.rank == 1 else None
    mesh = replicas(place, timeout_s=timeout_s, conditions=conditions)
    assert mesh.world.group.backend == "shm"  # type: ignore[attr-defined]
    sentences = []
    mesh.world.all_reduce(torch.ones(1 << 20)).wait()
    for _ in range(2):
        try:
            mesh.world.all_reduce(torch.ones(1 << 20)).wait()
        except CollectiveError as error:
            sentences.append(str(error))
    return sentences[0], sentences[1]


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_at_once(ranks, size: int) -> None:
    """After kill -9 the survivors fail without waiting for the timeout, name the dead, and stay failed."""
    outcomes = ranks.outcomes(size, errors_of, Fault("all_reduce", 1, "kill"), NEVER_S)
    for rank in set(range(size)) - {1}:
        survived, sentences = outcomes[rank]
        assert survived, sentences
        assert all("rank 1 (host" in sentence and "did not come" in sentence for sentence in sentences)
        assert "all_reduce number 1" in sentences[0]


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_the_timeout(ranks) -> None:
    """A rank that stands still (SIGSTOP) keeps its streams open; the timeout ends the wait and names it."""
    (survived, sentences), _ = ranks.outcomes(2, errors_of, Fault("all_reduce", 1, "stop"), STOPPED_S, lost=[1])
    assert survived, sentences
    assert "rank 1 (host" in sentences[0]
    assert "did not come" in sentences[0]


def refused(place, break_it: Callable[[int], None]) -> tuple[str, float, list[str]]:
    """Why the ranks fall back, and what Gloo then sums."""
    break_it(place.rank)
    try:
        mesh = replicas(place)
    finally:
        mend()
    tensor = torch.ones(100_000)
    mesh.world.all_reduce(tensor).wait()
    return mesh.world.group.why, float(tensor[-1]), [mesh.world.group.backend]  # type: ignore[attr-defined]


_identity = host.host_identity
_honest = {name: getattr(host.Handshake, name) for name in ("open", "knock", "enter", "confirm")}
_getuid = os.getuid


def mend() -> None:
    """The workers of the pool are used again."""
    host.host_identity = _identity
    for name, method in _honest.items():
        setattr(host.Handshake, name, method)
    os.getuid = _getuid


def other_host(rank: int) -> None:
    host.host_identity = lambda: f"boot-{rank}"


def other_user(rank: int) -> None:
    os.getuid = lambda: rank


def no_door(rank: int) -> None:
    def broken(*_: object) -> str:
        raise OSError("no folder")

    if rank == 0:
        host.Handshake.open = broken  # type: ignore[method-assign]


def no_way_to_others(rank: int) -> None:
    """The others wait at their doors for the last rank, which cannot tell them there."""

    def broken(*_: object) -> None:
        raise OSError("no way there")

    if rank == 2:
        host.Handshake.knock = broken  # type: ignore[method-assign]


def closed_door(rank: int) -> None:
    def broken(self, doors) -> None:
        return _honest["knock"](self, [door + "-elsewhere" for door in doors])

    if rank == 1:
        host.Handshake.knock = broken  # type: ignore[method-assign]


def lost_on_the_way(rank: int) -> None:
    def broken(self) -> None:
        self.hang_up()
        raise OSError("no descriptors left")

    if rank == 1:
        host.Handshake.enter = broken  # type: ignore[method-assign]


def not_confirmed(rank: int) -> None:
    """It has everything that it needs, and fails before it has told anybody."""

    def broken(self) -> None:
        raise OSError("no more words")

    if rank == 0:
        host.Handshake.confirm = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (other_host, "gloo: ranks on 3 hosts"),
        (other_user, "gloo: ranks of 3 users"),
        (no_door, "gloo: rank 0: no folder"),
        (no_way_to_others, "gloo: rank 2: no way there"),
        (closed_door, "gloo: rank 1: nobody listens at the door of rank 0: another network namespace?"),
        (lost_on_the_way, "gloo: rank 1: no descriptors left"),
        (not_confirmed, "gloo: rank 0: no more words"),
    ],
)
def test_ranks_that_cannot_share_memory_agree_on_gloo_and_say_why(ranks, break_it, why: str) -> None:
    """Whatever step of the handshake fails on whichever rank, all ranks fall back together, with one reason."""
    assert ranks(3, refused, break_it) == [(why, 3.0, ["gloo"])] * 3


def asked_for_gloo(place) -> tuple[str, str]:
    group = connect(
        place.store,
        place.rank,
        place.size,
        device=torch.device("cpu"),
        label="t",
        ledger=Ledger(),
        wire=WireConfig(timeout_s=180, transport="gloo"),
    ).group
    return group.backend, group.why  # type: ignore[attr-defined]


def test_gloo_is_used_where_it_is_asked_for(ranks) -> None:
    """`transport="gloo"` opens no segment."""
    assert ranks(2, asked_for_gloo) == [("gloo", "gloo: asked for")] * 2


def without_core(place, transport: str) -> tuple[str, str, float]:
    """Rank 1 has no core: what the group speaks over, why, and what it sums; or the refusal."""
    honest = connecting.core_identity

    def missing() -> str:
        raise CoreMissing("the shared-memory core was not built: install a C compiler, then reinstall Shoal")

    if place.rank == 1:
        connecting.core_identity = missing
    try:
        group = connect(
            place.store, place.rank, place.size, device=torch.device("cpu"), label="t", ledger=Ledger(),
            wire=WireConfig(timeout_s=180, transport=transport),  # type: ignore[arg-type]
        )  # fmt: skip
    except EnvironmentFault as refusal:
        return "refused", str(refusal), 0.0
    finally:
        connecting.core_identity = honest
    tensor = torch.ones(100_000)
    group.all_reduce(tensor).wait()
    return group.group.backend, group.group.why, float(tensor[-1])  # type: ignore[attr-defined]


def test_without_a_core_all_ranks_use_gloo_and_say_why(ranks) -> None:
    """Where one rank has none, none uses it, and the reason names the repair."""
    missing = "the shared-memory core was not built: install a C compiler, then reinstall Shoal"
    why = f"gloo: 2 ranks on one host, and {missing}"
    assert ranks(2, without_core, "auto") == [("gloo", why, 2.0)] * 2


@pytest.mark.parametrize("transport", ["shm", "hierarchical"])
def test_shared_memory_that_was_asked_for_needs_the_core(ranks, transport: str) -> None:
    """It is refused on all ranks with the repair, not replaced."""
    for kind, sentence, _ in ranks(2, without_core, transport):
        assert kind == "refused"
        assert f'wire.transport = "{transport}"' in sentence
        assert "install a C compiler, then reinstall Shoal" in sentence
