"""`hvd.elastic`: ranks are lost, leave and join, and training goes on as the one process that this test plays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from shoal.coordinator.client import Address
from shoal.coordinator.service import coordinator_in
from shoal.coordinator.watch import view_of
from shoal.errors import Stopped
from shoal.fleet.processes import RANK_INSIDE, coordinator_variables, replica_variables
from shoal.horovod import elastic as elastic_module
from shoal.horovod import members as members_module
from shoal.horovod.elastic import ElasticSampler, HostsUpdatedInterrupt, ObjectState, TorchState, run
from shoal.horovod.engine import HorovodInternalError
from shoal.horovod.members import ELASTIC_TIMEOUT, Members, holders_first, lost_state
from shoal.launcher import sockets
from shoal.launcher.environment import STORE_FD, Place
from shoal.resilience.events import View
from shoal.resilience.membership import Rules
from shoal.resilience.participant import FencedOut
from tests.horovod.test_horovod import CHANGED, SCRIPTS
from tests.waiting import HANG_S, NEVER_S, wait_until

CLOSE = {"rel": 1e-9}  # float64, summed in another order


class Alone:
    """The process of Horovod's calls, with a place that a test sets; nobody replaces ranks."""

    members = None

    def __init__(self) -> None:
        self.rank, self.size, self.resets = 0, 1, 0

    def there(self) -> Place:
        return Place(self.rank, self.size, self.rank, self.size, 0, "shoal")

    def ready(self) -> None: ...


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    found = Alone()
    monkeypatch.setattr(elastic_module, "process", lambda: found)
    return found


def played(steps: list[list[Any]], batch: int, lr: float) -> tuple[list[float], list[list[float]]]:
    """Losses and weights of the script `elastic.py` in one process that takes each step's batches of all ranks in turn:
    `steps` has (epoch, number of ranks) of each.
    """
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (100,), generator=draw)
    data = torch.randn(100, 6, generator=draw) + labels.view(-1, 1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    losses, used, before, dealt = [], set(), None, []
    for epoch, size, _ in steps:
        used = used if before is not None and before[0] == epoch else set()
        if before != (epoch, size):
            left = [index for index in range(100) if index not in used]
            order = torch.randperm(len(left), generator=torch.Generator().manual_seed(epoch)).tolist()
            dealt = [left[at] for at in order]
            dealt += dealt[: -len(dealt) % size]
        before, now, dealt = (epoch, size), dealt[: batch * size], dealt[batch * size :]
        optimizer.param_groups[0]["lr"] = lr * size
        optimizer.zero_grad()
        of_ranks = [F.cross_entropy(model(data[now[r::size]].double()), labels[now[r::size]]) for r in range(size)]
        mean = torch.stack(of_ranks).mean()
        mean.backward()
        optimizer.step()
        used.update(now)
        losses.append(mean.item())
    return losses, [parameter.flatten().tolist() for parameter in model.parameters()]


class Launched:
    """A launcher of the script, which is ended with the block, and its ranks with it."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        options: tuple[str, ...] = ("-n", "3", "--min", "2"),
        name: str = "launcher",
    ) -> None:
        text = (SCRIPTS / "elastic.py").read_text()
        assert text.count(CHANGED[0]) == 1
        (folder / "elastic.py").write_text(text.replace(*CHANGED))
        self._said = folder / f"{name}.stderr"
        command = [sys.executable, "-m", "shoal", "launch", *options, "elastic.py", *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._said.open("w") as stderr:
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stderr=stderr)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """What the launcher and its rank 0 have said so far."""
        return f"== {self._said.name}\n{self._said.read_text()}"

    def ended(self) -> bool:
        """Whether the launcher has."""
        return self.process.poll() is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (("--rank", "1"), [3, 2]),
        (("--rank", "0", "--until-sizes", "2"), [3, 2, 3]),
        (("--rank", "1", "--signal", "SIGTERM"), [3, 2]),
    ],
)
def test_an_elastic_script_of_horovods_goes_on(tmp_path: Path, arguments: tuple[str, ...], sizes: list[int]) -> None:
    """A rank is killed, rank 0 is killed and replaced, or a rank leaves: each step's loss and the weights are those of
    one process, every sample is used once an epoch, and a step that failed is taken again.
    """
    with Launched(tmp_path, *arguments) as launcher:
        wait_until(launcher.ended, launcher.said)
    assert launcher.process.returncode == 0, launcher.said()
    found = json.loads((tmp_path / "found.json").read_text())
    seen = [size for _, size, _ in found["steps"]]
    changes = [size for size, before in zip(seen, [None, *seen], strict=False) if size != before]
    assert changes[: len(sizes)] == sizes
    losses, weights = played(found["steps"], batch=8, lr=0.01)
    assert [loss for *_, loss in found["steps"]] == pytest.approx(losses, **CLOSE)
    assert bool(found["went_back"]) == ("SIGTERM" not in arguments)
    for ours, want in zip(found["weights"], weights, strict=True):
        assert ours == pytest.approx(want, **CLOSE)


@pytest.mark.slow
def test_launchers_of_several_hosts_come_and_go(tmp_path: Path) -> None:
    """Two launchers share a coordinator: the second joins the first, which is then told to stop. Its rank leaves at a
    commit, so that no call of the other one fails.
    """
    rules = Rules(1, 2, start_s=0.0, silence_s=NEVER_S)
    launchers: list[Launched] = []
    with ExitStack() as stack:
        address = stack.enter_context(coordinator_in(tmp_path, rules, told=lambda news: None))

        def have_stepped() -> bool:
            """Whether all have taken a step together, and hold it: the end of an epoch is a commit without one."""
            view = view_of(address)
            return len(view.members) == len(launchers) and view.committed >= view.step + 2

        def said() -> str:
            return "\n".join(launcher.said() for launcher in launchers)

        where = ("--coordinator", f"{address.host}:{address.port}", "--token", str(tmp_path / "token"))
        for name in ("host-1", "host-2"):
            options = ("-n", "1", *where, "--directory", name)
            launchers.append(stack.enter_context(Launched(tmp_path, "--until-sizes", "2", options=options, name=name)))
            wait_until(have_stepped, said)
        launchers[0].process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(launcher.ended() for launcher in launchers), said)
    assert [launcher.process.returncode for launcher in launchers] == [75, 0], said()
    found = json.loads((tmp_path / "found.json").read_text())
    sizes = [size for _, size, _ in found["steps"]]
    assert sizes[0] == sizes[-1] == 1
    assert 2 in sizes
    assert not found["went_back"]


def test_samples_are_divided_anew_and_used_once(alone: Alone) -> None:
    """Two of three ranks are left after a batch: the rest of the epoch goes to them, with what the third had used."""
    parts = []
    for rank in range(3):
        alone.rank, alone.size = rank, 3
        parts.append(ElasticSampler(range(20), seed=3))
        parts[-1].record_batch(0, 2)
    first = [index for part in parts for index in list(part)[:2]]
    assert len(set(first)) == 6
    assert all(part.processed_indices == set(first) for part in parts)
    rest = []
    for rank in range(2):
        alone.rank, alone.size = rank, 2
        parts[rank].join_states([part.state_dict() for part in parts[:2]])
        rest += list(parts[rank])
    assert sorted(first + rest) == list(range(20))
    alone.size = 3
    parts[0].reset()
    assert len(parts[0]) == 5  # of 14, filled up to 15
    parts[0].set_epoch(1)
    assert len(parts[0]) == 7
    assert not parts[0].processed_indices


def test_a_commit_is_gone_back_to(alone: Alone) -> None:
    """Weights, momentum, a scheduler and plain values; gradients of the step that failed are dropped."""
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, seen=[1])

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        state.epoch += 1
        state.seen.append(state.epoch)

    step()
    state.commit()
    kept = [parameter.clone() for parameter in model.parameters()]
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    for _ in range(2):  # a copy that is gone back to stays whole
        step()
        state.restore()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))
        assert all(
            torch.equal(optimizer.state[p]["momentum_buffer"], m)
            for p, m in zip(model.parameters(), momentum, strict=True)
        )
        assert (state.epoch, state.seen, scheduler.last_epoch) == (1, [1, 1], 1)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_is_called_again(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure from the commit, after an update from where it was; callbacks hear of both."""
    alone.members = object()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(Alone, "reset", lambda self, failed: told.append(("reset", failed)), raising=False)
    monkeypatch.setattr(elastic_module, "_leaving_when_asked", lambda: __import__("contextlib").nullcontext())
    told: list[Any] = []

    class Known(ObjectState):
        def sync(self) -> None:
            told.append("sync")

    state = Known(count=0)
    state.register_reset_callbacks([lambda: told.append("callback")])

    @run
    def train(state: Known, name: str) -> str:
        told.append(("call", state.count))
        state.count += 1
        if state.count == 1:
            state.save()
            state.count = 5
            raise HorovodInternalError("a rank was lost")
        if state.count == 2:
            raise HostsUpdatedInterrupt(skip_sync=True)
        return name

    assert train(state, "done") == "done"
    again = ["callback", "sync", ("call", 1), ("reset", False), "callback", ("call", 2)]
    assert told == ["sync", ("call", 0), ("reset", True), *again]
    with pytest.raises(Exception, match="is no state"):
        train(object(), "x")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("held", "used"), [(True, {0, 1, 5}), (False, {0})])
def test_samples_of_commits_that_are_lost_are_unused(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, held: bool, used: set[int]
) -> None:
    """Where nobody holds the newest commit, rank 0's state alone is taken, and what others had used was not."""
    others = [{"epoch": 0, "processed_indices": [1, 5]}]
    monkeypatch.setattr(elastic_module, "allgather_object", lambda own, name: [own, *others])
    monkeypatch.setattr(elastic_module, "broadcast_object", lambda value, name: value)
    alone.members = SimpleNamespace(state_held=held)  # pyright: ignore[reportAttributeAccessIssue]
    sampler = ElasticSampler(range(8))
    sampler.record_indices([0])
    TorchState(sampler=sampler).sync()
    assert sampler.processed_indices == used


def test_a_state_that_nobody_holds_is_said_to_be_lost() -> None:
    view = View(3, 3, ("b", "c"), (), 7, 7, 7, ("2:2", "3:3"))
    assert "nobody holds commit 7" in str(lost_state(view, had=5))
    assert "what rank 0 has since commit 5" in str(lost_state(view, had=5))
    assert "begins anew" in str(lost_state(view, had=None))
    assert lost_state(msgspec.structs.replace(view, holders=("c",)), had=None) is None
    assert lost_state(msgspec.structs.replace(view, step=0), had=None) is None


def member_of(address: Address, token: Path, name: str) -> Members:
    """A rank that joins from a host of its own, in this process."""
    listener = sockets.listen_at(address.host, 0, one_host=True)
    port = listener.getsockname()[1]
    given = {"MASTER_ADDR": address.host, "MASTER_PORT": str(port), STORE_FD: str(listener.detach())}
    given |= {"RANK": "0", RANK_INSIDE: "0", ELASTIC_TIMEOUT: str(HANG_S)}
    told = replica_variables(name, ranks=1, terminal_fd=os.dup(1), late=False, several_hosts=True)
    return Members({**given, **told, **coordinator_variables(address, token)})


def test_a_member_that_others_cannot_reach_goes(tmp_path: Path) -> None:
    """Where both reach the coordinator, generation after generation would fail: after some, one is left alone."""
    rules = Rules(1, 2, silence_s=NEVER_S, start_s=NEVER_S)
    with coordinator_in(tmp_path, rules, told=lambda news: None) as address, ThreadPoolExecutor(2) as pool:
        members = [member_of(address, tmp_path / "token", name) for name in "ab"]
        first, second = pool.map(lambda member: member.next(failed=False)[1].place.rank, members)
        reached, cut = members if first < second else reversed(members)
        cut._own.close()

        def comes_to_be_alone(member: Members) -> bool:
            return any(member.next(failed=True)[1].place.world_size == 1 for _ in range(20))

        alone, lost = (pool.submit(comes_to_be_alone, member) for member in (reached, cut))
        assert alone.result(HANG_S)
        with pytest.raises(FencedOut, match="its peers cannot reach it"):
            lost.result(HANG_S)
        for member in members:
            member.close()


def test_who_leaves_does_not_wait_for_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two that have to be two leaves while the other waits for another in its place; then the other leaves."""
    monkeypatch.setattr(members_module, "LEAVE_S", 0.1)
    rules = Rules(2, 2, silence_s=NEVER_S, start_s=NEVER_S)
    with coordinator_in(tmp_path, rules, told=lambda news: None) as address, ThreadPoolExecutor(2) as pool:
        members = [member_of(address, tmp_path / "token", name) for name in "ab"]
        for formed in [pool.submit(member.next, failed=False) for member in members]:
            formed.result(HANG_S)
        left, waits = (pool.submit(member.next, failed=False) for member in members)
        for member, answer in zip(members, (left, waits), strict=True):
            assert not answer.done()
            member.leave()
            with pytest.raises(Stopped):
                answer.result(HANG_S)
        for member in members:
            member.close()


@pytest.mark.parametrize(("leaving", "raised"), [(1, HostsUpdatedInterrupt), (3, Stopped)])
def test_ranks_that_all_leave_end_at_the_same_commit(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, leaving: int, raised: type[Exception]
) -> None:
    """Where some are left, they go on."""
    alone.size = 3
    alone.members = SimpleNamespace(changing=True, leaving=True)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(elastic_module, "allreduce", lambda own, name, op: own * leaving)
    with pytest.raises(raised):
        ObjectState().check_host_updates()


def test_who_holds_the_newest_commit_comes_first() -> None:
    """Rank 0's state is the one that the others take."""
    view = View(2, 2, ("a", "b", "c"), ("c", "b"), 7, 7, 7, ("1:1", "2:2", "3:3"))
    found = holders_first(view)
    assert (found.members, found.addresses) == (("b", "c", "a"), ("2:2", "3:3", "1:1"))
