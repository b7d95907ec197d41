"""Scripts of Horovod's run with one changed line and train as under DDP; calls are matched by name; `join`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import CollectiveError
from shoal.horovod import operations as operations_module
from shoal.horovod.engine import Engine, Handle, HorovodInternalError
from shoal.horovod.negotiation import Begun, Word, conflict, fused, ready
from shoal.horovod.process import Timeline
from tests.forkserver import forkserver
from tests.ports import free_port
from tests.waiting import HANG_S, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
CHANGED = ("import horovod.torch as hvd", "import shoal.horovod as hvd")
CLOSE = {"rel": 1e-5}  # float32; DDP divides before it sums
ROUNDED = {"rel": 2e-3}  # gradients in float16


def on_ranks(world: int, target: Callable[..., Any], *given: Any) -> list[Any]:
    """What `target(rank, *given)` returns in processes that a launcher would have started."""
    context, port = forkserver(), free_port()
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=_be_rank, args=(pipes[rank][1], rank, world, port, target, given))
        for rank in range(world)
    ]  # fmt: skip
    for process in processes:
        process.start()
    found = []
    for process, (pipe, _) in zip(processes, pipes, strict=True):
        assert pipe.poll(HANG_S), "a rank did not answer"
        found.append(pipe.recv())
        process.join(HANG_S)
    assert all(worked for worked, _ in found), found
    return [value for _, value in found]


def _be_rank(pipe: Any, rank: int, world: int, port: int, target: Callable[..., Any], given: Sequence[Any]) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    try:
        pipe.send((True, target(rank, *given)))
    except BaseException as error:
        pipe.send((False, repr(error)))


def run_script(rank: int, path: str, arguments: Sequence[str]) -> None:
    os.chdir(Path(path).parent)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def under_horovod(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The losses of the script with the one line changed, on two ranks."""
    text = (SCRIPTS / name).read_text()
    assert text.count(CHANGED[0]) == 1
    (folder / name).write_text(text.replace(*CHANGED))
    on_ranks(2, run_script, str(folder / name), arguments)
    return json.loads((folder / "losses.json").read_text())


def under_ddp(rank: int, folder: str, name: str) -> None:
    """The same script with DDP in the place of Horovod's optimizer."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sys.modules["horovod"] = sys.modules["horovod.torch"] = _DDPInstead()
    run_script(rank, str(Path(folder) / name), ["--losses", f"{folder}/ddp.json"])


class _DDPInstead(type(os)):
    """What the scripts ask of `hvd`, by `torch.distributed` and DDP."""

    Average = "avg"
    Compression = type("Compression", (), {"none": None})

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.torch = self

    def init(self) -> None: ...
    def size(self) -> int:
        return dist.get_world_size()

    def rank(self) -> int:
        return dist.get_rank()

    def broadcast_parameters(self, *_: Any, **__: Any) -> None: ...
    def broadcast_optimizer_state(self, *_: Any, **__: Any) -> None: ...

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()

    def DistributedOptimizer(self, optimizer: Any, **_: Any) -> Any:
        main = sys._getframe(1).f_globals
        main["model"] = nn.parallel.DistributedDataParallel(main["model"], broadcast_buffers=False)
        return optimizer


@pytest.mark.parametrize("name", ["mnist.py", "synthetic_benchmark.py"])
def test_a_script_of_horovods_trains_as_under_ddp(name: str, tmp_path: Path) -> None:
    """One line is changed; every loss is DDP's."""
    ours = under_horovod(name, tmp_path)
    (tmp_path / name).write_text((SCRIPTS / name).read_text())
    on_ranks(2, under_ddp, str(tmp_path), name)
    ddp = json.loads((tmp_path / "ddp.json").read_text())
    assert len(ours["losses"]) >= 5
    assert ours["losses"] == pytest.approx(ddp["losses"], **CLOSE)
    if "test" in ours:
        assert ours["test"] == pytest.approx(ddp["test"], **CLOSE)
    assert ours["losses"][0] > ours["losses"][-1]


def test_the_scripts_options_work(tmp_path: Path) -> None:
    """Gradients in float16, and a mean that is divided in two halves: nearly the same losses."""
    for folder in ("plain", "options"):
        (tmp_path / folder).mkdir()
    plain = under_horovod("mnist.py", tmp_path / "plain", "--epochs", "1")
    options = under_horovod(
        "mnist.py", tmp_path / "options", "--epochs", "1", "--fp16-allreduce", "--gradient-predivide-factor", "2.0"
    )
    assert options["losses"] != plain["losses"]
    assert options["losses"] == pytest.approx(plain["losses"], **ROUNDED)


def operations(rank: int, folder: str) -> list[str]:
    """What is wrong, by name."""
    import shoal.horovod as hvd

    hvd.init()
    n, right = hvd.size(), {}
    hvd.start_timeline(f"{folder}/timeline-{rank}.json", mark_cycles=True)
    x = torch.arange(5.0) + rank
    right["sum"] = torch.equal(hvd.allreduce(x, op=hvd.Sum), n * torch.arange(5.0) + 3)
    right["mean"] = torch.equal(hvd.allreduce(x), torch.arange(5.0) + 1)
    own = x.clone()
    right["in place"] = torch.equal(hvd.allreduce_(own, op=hvd.Max), torch.arange(5.0) + 2) and own[0] == 2
    right["strides"] = torch.equal(hvd.allreduce(torch.ones(4, 4).t()[::2], op=hvd.Sum), torch.full((2, 4), 3.0))
    right["half"] = hvd.allreduce(torch.ones(3), compression=hvd.Compression.fp16).dtype == torch.float32
    right["bfloat16"] = torch.equal(hvd.allreduce(torch.ones(3).bfloat16(), op=hvd.Sum), torch.full((3,), 3).bfloat16())
    large = torch.tensor([4e4, -6.5e4, rank, 6e-8], dtype=torch.float16)
    right["large halves"] = hvd.allreduce(large).tolist() == torch.tensor([4e4, -6.5e4, 1, 6e-8]).half().tolist()
    halved = hvd.allreduce(large[:1], op=hvd.Sum, postscale_factor=0.5), hvd.allreduce(large[:1], op=hvd.Sum)
    right["sums of large halves"] = [float(each) for each in halved] == [float(torch.tensor(6e4).half()), float("inf")]
    handles = {}
    for name in "abc" if rank % 2 else "cba":  # in another order
        handles[name] = hvd.allreduce_async(torch.full((3,), float(ord(name))), name=name, op=hvd.Sum)
    right["order"] = all(hvd.synchronize(handles[name])[0] == ord(name) * n for name in "abc")
    group = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.float64)], op=hvd.Sum)
    right["group"] = [t.dtype for t in group] == [torch.float32, torch.float64] and group[1].sum() == 9
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
    right["gather"] = gathered[:, 0].tolist() == [0, 1, 1, 2, 2, 2]
    right["broadcast"] = int(hvd.broadcast(torch.tensor(rank), 1)) == 1
    right["object"] = hvd.broadcast_object({"a": (1, 2.5), 3: [None, "x"]} if rank == 0 else None) == {
        "a": (1, 2.5),
        3: [None, "x"],
    }
    right["objects"] = hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(n)]
    rows, received = hvd.alltoall(torch.arange(6), splits=[1, 2, 3])
    right["exchange"] = received.tolist() == [rank + 1] * 3 and len(rows) == 3 * (rank + 1)
    right["scatter"] = hvd.reducescatter(torch.ones(7, 2), op=hvd.Sum).shape[0] == (3 if rank == 0 else 2)
    late = hvd.alltoall_async(torch.arange(3)), hvd.reducescatter_async(torch.ones(3), op=hvd.Sum)
    right["later"] = [hvd.synchronize(each).tolist() for each in late] == [[rank] * 3, [3.0]]
    pair = hvd.grouped_allgather([torch.full((1,), rank), torch.full((rank,), rank)])
    right["gathered"] = [t.tolist() for t in pair] == [[0, 1, 2], [1, 2, 2]]
    leaf = torch.ones(2, requires_grad=True)
    hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
    right["gradient"] = leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0]
    try:
        hvd.allreduce(torch.ones(2 + rank), name="different")
        right["refused"] = False
    except ValueError as error:
        right["refused"] = "allreduce.different: shape" in str(error)
    sums = [float(hvd.allreduce(torch.ones(1), name=f"uneven {i}", op=hvd.Sum)) for i in range(1 + rank)]
    right["joined"] = hvd.join() == 2 and sums == [3.0, 2.0, 1.0][: rank + 1]
    hvd.barrier()
    hvd.stop_timeline()
    hvd.shutdown()
    return [name for name, holds in right.items() if not holds]


def test_every_operation(tmp_path: Path) -> None:
    assert on_ranks(3, operations, str(tmp_path)) == [[], [], []]
    events = json.loads((tmp_path / "timeline-0.json").read_text())
    assert {"NEGOTIATE", "ALLREDUCE", "BROADCAST", "CYCLE_START"} <= {event.get("name") for event in events}


def accumulates(rank: int) -> list[float]:
    """Weights after a step of two backwards, of a model that one rank uses in part only."""
    import shoal.horovod as hvd

    hvd.init()
    torch.manual_seed(0)
    model = nn.ModuleDict({"both": nn.Linear(3, 1), "one": nn.Linear(3, 1)}).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backward_passes_per_step=2, num_groups=2
    )
    for step in range(2):
        x = torch.full((2, 3), 1.0 + rank + step).double()
        y = model["both"](x).sum() + (model["one"](x).sum() if rank == 0 else 0.0)
        y.backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    hvd.shutdown()
    return [float(p) for tensor in model.parameters() for p in tensor.flatten()]


def test_backwards_add_up_and_missing_gradients_are_zeros() -> None:
    """d/dw of the mean over ranks: (1+2)·2 on rank 0, (2+3)·2 on rank 1."""
    ours = on_ranks(2, accumulates)
    torch.manual_seed(0)
    model = nn.ModuleDict({"both": nn.Linear(3, 1), "one": nn.Linear(3, 1)}).double()
    with torch.no_grad():
        for name, slope, constant in (("both", 8.0, 4.0), ("one", 3.0, 2.0)):
            model[name].weight -= 0.1 * slope
            model[name].bias -= 0.1 * constant
    want = [float(p) for tensor in model.parameters() for p in tensor.flatten()]
    assert ours[0] == ours[1] == pytest.approx(want)


def test_negotiation_is_in_one_order_and_conflicts_are_said() -> None:
    """Pure: what all have begun, as the lowest rank at work began it; a rank that joined waits for nothing."""
    a, b, c = (Begun(name, "allreduce", ("float32",), ((2,),)) for name in "abc")
    assert ready([Word((c, a, b)), Word((a, b, c))]) == ["c", "a", "b"]
    assert ready([Word((c, a)), Word((a,))]) == ["a"]
    assert ready([Word((), joined=True), Word((b, a))]) == ["b", "a"]
    assert ready([Word(joined=True)] * 2) == []
    assert conflict({0: a, 1: a}, 2) is None
    other = Begun("a", "allreduce", ("float64",), ((2,),))
    assert "dtype" in (conflict({0: a, 1: other}, 2) or "")
    assert "joined" in (conflict({0: Begun("x", "broadcast")}, 2) or "")
    assert fused([a, b, c, other], most_bytes=16, sizes=[8, 8, 8, 16]) == [[0, 1], [2], [3]]


def test_values_travel_without_pickle() -> None:
    value = {"t": torch.arange(3), 1: (2, [None, b"x", True]), "nested": {"lr": 0.1}}
    back = operations_module.decode(operations_module.encode(value))
    assert torch.equal(back.pop("t"), value.pop("t"))
    assert back == value
    with pytest.raises(Exception, match="cannot be sent"):
        operations_module.encode({"x": object()})


def in_sets(rank: int) -> list[str]:
    """Names of what went wrong with calls of two sets that share a rank."""
    import shoal.horovod as hvd
    from shoal.errors import UsageError

    first = hvd.ProcessSet([1, 0])
    hvd.init(process_sets=[first])
    second = hvd.add_process_set([1, 2])
    right = {}
    mine = [each for each in (first, second) if each.included()]
    begun = {each: hvd.allreduce_async(torch.full((2,), float(rank)), name="x", process_set=each) for each in mine}
    right["sums"] = all(hvd.synchronize(begun[each]).tolist() == [sum(each.ranks) / 2] * 2 for each in mine)
    right["size"] = all((each.size(), each.rank()) == (2, each.ranks.index(rank)) for each in mine)
    if first.included():
        rows = hvd.allgather(torch.full((rank + 1, 1), rank), process_set=first)
        right["gather"] = rows[:, 0].tolist() == [0, 1, 1]
        right["exchange"] = hvd.alltoall(torch.arange(2) + 10 * rank, process_set=first).tolist() == [rank, 10 + rank]
    if second.included():
        right["broadcast"] = int(hvd.broadcast(torch.tensor(rank), 2, process_set=second)) == 2
        right["scatter"] = hvd.reducescatter(torch.ones(3), op=hvd.Sum, process_set=second).tolist() == [2.0] * (
            3 - rank
        )
        hvd.barrier(process_set=second)
    whole = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.global_process_set)
    right["all"] = float(whole) == 3.0
    for what, call in {
        "integers": lambda: hvd.reducescatter(torch.arange(6)),
        "outside": lambda: hvd.allreduce(torch.ones(1), process_set=first if rank == 2 else hvd.ProcessSet([2])),
        "again": lambda: hvd.add_process_set([0, 1]),
        "absent": lambda: hvd.add_process_set([0, 3]),
        "root": lambda: hvd.broadcast(torch.ones(1), 0 if rank else 2, process_set=second if rank else first),
    }.items():
        try:
            call()
            right[what] = False
        except UsageError:
            right[what] = True
    if rank < 2:  # rank 2 calls nothing meanwhile
        right["alone"] = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first)) == 2.0
    if second.included():  # rank 1 has one batch more than rank 2
        sums = [float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=second)) for _ in range(4 - 2 * (rank - 1))]
        last = hvd.join(process_set=second)
        right["joined"] = last == 1 and sums == [2.0, 2.0, 1.0, 1.0][: len(sums)]
    right["removed"] = hvd.remove_process_set(second) and not hvd.remove_process_set(second)
    hvd.shutdown()
    return [name for name, holds in right.items() if not holds]


def test_process_sets_have_calls_of_their_own() -> None:
    """Under one name at once, in groups that share a rank; who is not in a set is refused, and hangs nobody."""
    assert on_ranks(3, in_sets) == [[], [], []]


def adaptive(rank: int, world: int) -> tuple[list[list[float]], list[float]]:
    """Adasum of two tensors of this rank, and a weight after a step of SGD."""
    import shoal.horovod as hvd

    hvd.init()
    found = hvd.grouped_allreduce(vectors(rank), op=hvd.Adasum)
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.5), op=hvd.Adasum)
    (weight @ vectors(rank)[0]).backward()
    optimizer.step()
    hvd.shutdown()
    return [each.tolist() for each in found], weight.tolist()


def vectors(rank: int) -> list[torch.Tensor]:
    """Two tensors, the second of which is zero on rank 1."""
    draws = torch.Generator().manual_seed(rank)
    first, second = (torch.randn(3, generator=draws, dtype=torch.float64) for _ in range(2))
    return [first, second * (rank != 1)]


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equation 3 of arXiv:2006.02924."""
    both = float(a @ b)
    return a * (1 - both / (2 * float(a @ a)) if a.any() else 1) + b * (1 - both / (2 * float(b @ b)) if b.any() else 1)


@pytest.mark.parametrize("world", [2, 3])
def test_adasum_is_that_of_its_equation(world: int) -> None:
    """For each tensor by itself, over two ranks, and over three: the last one's is added to the first one's before."""
    pairs = list(zip(*(vectors(rank) for rank in range(world)), strict=True))
    want = [adasum(adasum(each[0], each[2]) if world == 3 else each[0], each[1]) for each in pairs]
    for found, weight in on_ranks(world, adaptive, world):
        assert found == [pytest.approx(each.tolist(), rel=1e-12) for each in want]
        assert weight == pytest.approx((-0.5 * want[0]).tolist(), rel=1e-12)
    a = torch.tensor([3.0, 0.0])
    assert adasum(a, a).tolist() == [3.0, 0.0]
    assert adasum(a, torch.tensor([0.0, 2.0])).tolist() == [3.0, 2.0]


class _Broken:
    """A group whose every sum fails, as where a rank has died."""

    rank, size = 0, 1

    def all_gather(self, own: Any) -> Any:
        return [own]

    def all_reduce(self, *given: Any, **named: Any) -> None:
        raise CollectiveError("rank 1 is gone")

    def close(self) -> None:
        """Nothing is open."""


def test_a_call_that_fails_ends_whoever_waits_for_it() -> None:
    """And each later call is told the same."""
    engine = Engine(cast(Any, _Broken()), fusion_bytes=1 << 20, gpu=lambda: None, timeline=Timeline())
    begun = Begun("x", "allreduce", ("float32",), ((2,),))
    with pytest.raises(HorovodInternalError, match="rank 1 is gone"):
        engine.submit(Handle(begun, [torch.ones(2)])).wait()
    wait_until(lambda: engine.failure is not None)
    with pytest.raises(HorovodInternalError, match="rank 1 is gone"):
        engine.submit(Handle(begun, [torch.ones(2)]))
    engine.close()
