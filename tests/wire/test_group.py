"""Groups of ranks without torch: every call gives what NumPy gives, over each transport, and faults are named."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest

from shoal import wire
from shoal.errors import CollectiveError, GenerationOver, UsageError
from shoal.launcher import sockets
from shoal.launcher.environment import LOOPBACK, Place
from shoal.launcher.store.connection import StoreConnection, reach_store
from shoal.wire import connect
from shoal.wire.board import StoreBoard
from shoal.wire.tcp import VERSION, Tcp
from tests.waiting import HANG_S, wait_until
from tests.wire.processes import EPILOGUE, POISON, PRELUDE, run, run_codes, said_by, started

HOSTS = {"SharedMemory": (), "Tcp": ("a", "b", "c", "d"), "TwoLevels": ("a", "a", "b", "b")}

EVERY_CALL = """
from hashlib import sha256
n, me = group.size, group.rank
every = [np.random.default_rng(r).standard_normal((n * 3, 5)) for r in range(n)]
x = every[me]
right = {
    "sum": np.allclose(group.all_reduce(x), sum(every)),
    "strides": np.allclose(group.all_reduce(x[::2, ::-1]), sum(every)[::2, ::-1]),
    "avg": np.allclose(group.all_reduce(x, op="avg"), sum(every) / n),
    "avg of large": (group.all_reduce(np.full(5000, 4e4, np.float16), op="avg") == np.float16(4e4)).all(),
    "max": np.array_equal(group.all_reduce(x, op="max"), np.max(every, axis=0)),
    "scatter": np.allclose(group.reduce_scatter(x), sum(every)[3 * me : 3 * me + 3]),
    "gather": np.array_equal(group.all_gather(x), np.stack(every)),
    "broadcast": np.array_equal(group.broadcast(x, root=n - 1), every[n - 1]),
    "exchange": np.array_equal(group.all_to_all(np.arange(n) + 10 * me), 10 * np.arange(n) + me),
    "uneven": [a.size - me for a in group.all_to_all_uneven([np.ones(q + me) for q in range(n)])] == list(range(n)),
    "empty": group.all_reduce(np.zeros(0)).size == 0,
    "large": np.array_equal(group.all_reduce(np.full(300_001, me, np.int64)), np.full(300_001, n * (n - 1) // 2)),
}
own = x.copy()
group.all_reduce(own, out=own)
right["in place"] = np.allclose(own, sum(every))
big = np.full(1 << 20, me, np.uint8)
if me < 2:  # both send first: nobody waits for ever
    if me == 0:
        group.send(big, to=1, tag=7)
        right["message"] = group.receive(np.empty(9), source=1)[0] == 3.0
    else:
        right["message"] = not group.receive(big, source=0, tag=7).any()
        group.send(np.full(9, 3.0), to=0)
group.barrier()
wrong = [name for name, holds in right.items() if not holds]
result = [type(group._transport).__name__, wrong, group.ledger.total().calls]
"""


@pytest.mark.parametrize("transport", HOSTS)
def test_every_call_gives_what_numpy_gives(transport: str) -> None:
    for name, wrong, calls in run(4, EVERY_CALL, hosts=HOSTS[transport]):
        assert (name, wrong) == (transport, [])
        assert calls >= 13


ODD_ARRAYS = """
import ml_dtypes, threading
from shoal.errors import UsageError
n, me, result = group.size, group.rank, {}

def every(make):
    return [make(np.random.default_rng(r)) for r in range(n)]

def note(name, found, wanted):
    result[name] = bool(np.array_equal(np.asarray(found), np.asarray(wanted)) and np.shape(found) == np.shape(wanted))

for name in "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64".split():
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    xs = every(lambda draw: draw.integers(0, 3, (n, 3)).astype(dtype))
    note(f"sum {name}", group.all_reduce(xs[me]), np.sum(xs, axis=0, dtype=dtype))
    note(f"gather {name}", group.all_gather(xs[me]), np.stack(xs))
    note(f"exchange {name}", group.all_to_all(xs[me]), np.stack([x[me] for x in xs]))
    note(f"root {name}", group.broadcast(xs[me], root=1), xs[1])
for name in (">f4", ">i8", "M8[s]", "U5", "V7"):
    xs = every(lambda draw: draw.integers(0, 3, (n, 3)).astype(name) if name != "V7" else np.zeros((n, 3), "V7"))
    note(f"gather {name}", group.all_gather(xs[me]), np.stack(xs))
    note(f"exchange {name}", group.all_to_all(xs[me]), np.stack([x[me] for x in xs]))
xs = every(lambda draw: draw.integers(-9, 10, (8, n * 600)).astype(float))
total, x = sum(xs), xs[me]
note("Fortran", group.all_reduce(np.asfortranarray(x)), total)
note("strides", group.all_reduce(x[::-2, 3::5]), total[::-2, 3::5])
note("matrix", group.all_reduce(np.matrix(x)), total)
note("0-d", group.all_reduce(x[0, 0]), total[0, 0])
note("nothing", group.all_gather(np.zeros((0, 3))), np.zeros((n, 0, 3)))
fixed = x.copy()
fixed.flags.writeable = False
note("read-only", group.all_reduce(fixed), total)
whole = np.asfortranarray(x)
group.all_reduce(whole, out=whole)
note("Fortran in place", whole, total)
part = np.zeros((16, n * 1200))
part[::2, 1::2] = x
group.all_reduce(part[::2, 1::2], out=part[::2, 1::2])
note("strides in place", part[::2, 1::2], total)
note("beside it", [part[1::2].any(), part[:, ::2].any()], [False, False])

def within(call, sent, size, place):
    "Into memory that what is sent lies in, `place` numbers after it."
    memory = np.zeros(4 * sent.size)
    begin = 2 * sent.size
    given, out = memory[begin : begin + sent.size], memory[begin + place : begin + place + size]
    given[:] = sent.reshape(-1)
    return call(given, out).copy()

long = [np.arange(400_000.0) * (r + 1) for r in range(n)]
shares = [block.reshape(n, -1) for block in long]
for place in (0, 1, -1, 100_000, -100_000):
    note(f"sum at {place}", within(lambda x, o: group.all_reduce(x, out=o), long[me], 400_000, place), sum(long))
    given = long[me].size // n
    found = within(lambda x, o: group.reduce_scatter(x, out=o), long[me], given, place)
    note(f"scatter at {place}", found, sum(long)[given * me : given * (me + 1)])
    found = within(lambda x, o: group.all_to_all(x.reshape(n, -1), out=o.reshape(n, -1)), long[me], 400_000, place)
    note(f"exchange at {place}", found.reshape(n, -1), np.stack([share[me] for share in shares]))
    memory = np.zeros(n * 400_000 + 400_000)
    memory[100_000 + place : 500_000 + place] = long[me]
    found = group.all_gather(memory[100_000 + place : 500_000 + place], out=memory[: n * 400_000].reshape(n, -1))
    note(f"gather at {place}", found, np.stack(long))
own = np.zeros((n, 400_000))
own[me] = long[me]
note("gather in place", group.all_gather(own[me], out=own), np.stack(long))
own = long[me].copy()
note("scatter in place", group.reduce_scatter(own, out=own[given * me : given * (me + 1)]),
     sum(long)[given * me : given * (me + 1)])
group.barrier()
group._busy = True
try:
    group.barrier()
except UsageError as error:
    result["threads"] = str(error) == f"barrier while another thread of rank {me} uses the group: take turns"
group._busy = False
result = [name for name, holds in result.items() if not holds] + [len(result)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", HOSTS)
def test_odd_arrays_give_what_numpy_gives(transport: str) -> None:
    """Every dtype, byte orders, strides, results in the memory that is sent."""
    assert run(4, ODD_ARRAYS, hosts=HOSTS[transport]) == [[98]] * 4


BITS = """
import ml_dtypes
from hashlib import sha256
result = {}
names = "float32 float64 float16 bfloat16 int8 uint8 int32 int64 bool complex64 uint32"
for name in names.split():
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    for op in ("sum", "avg", "max", "min", "product"):
        x = (100 * np.random.default_rng(group.rank).standard_normal(1501)).astype(dtype)
        try:
            result[f"{name} {op}"] = sha256(group.all_reduce(x, op=op).tobytes()).hexdigest()
        except Exception as error:
            result[f"{name} {op}"] = type(error).__name__
"""


def test_tcp_sums_to_the_bits_of_shared_memory() -> None:
    """All dtypes and reductions; what one refuses, the other does."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 of NumPy is that of ml_dtypes, which JAX brings along")
    here, apart = run(3, BITS), run(3, BITS, hosts=("a", "b", "c"))
    assert here[0] == here[1] == here[2] == apart[0] == apart[1] == apart[2]
    assert sum(len(value) == 64 for value in here[0].values()) > 40
    assert here[0]["int32 avg"] == "UsageError"


MIXED = """
import os, sys
import numpy as np
x = np.random.default_rng(int(os.environ["RANK"])).standard_normal(70_001).astype(np.float32)
"""
NUMPY = MIXED + "sys.modules['torch'] = None\nfrom shoal import wire\ny = wire.init().all_reduce(x)\n"
JAX = MIXED + (
    "sys.modules['torch'] = None\nimport jax.numpy as jnp\nfrom shoal import wire\n"
    "y = wire.init().all_reduce(jnp.asarray(x))\n"
)
TORCH = MIXED + (
    "import torch, shoal.c10d\nshoal.c10d.init_process_group()\n"
    "t = torch.from_numpy(x)\ntorch.distributed.all_reduce(t)\ny = t.numpy()\n"
)
DIGEST = "from hashlib import sha256\nimport json\nresult = sha256(y.tobytes()).hexdigest()" + EPILOGUE


@pytest.mark.slow
def test_numpy_jax_and_torch_ranks_sum_to_the_same_bits() -> None:
    pytest.importorskip("jax", reason="a rank of this group is JAX's")
    found = run_codes([code + DIGEST for code in (NUMPY, TORCH, JAX)])
    assert len(set(found)) == 1


def test_nothing_of_the_wire_imports_torch() -> None:
    """Where torch cannot be imported, the wire can, and its start takes no event loop; the poison itself works."""
    look = "import sys; from shoal import wire; wire.init(); print('asyncio' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", POISON + look], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
    poisoned = subprocess.run([sys.executable, "-c", POISON + "import shoal.c10d"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in poisoned.stderr


def test_another_timeout_than_that_of_the_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one is not, nor a new group's."""
    monkeypatch.setattr(connect, "_here", cache(connect._Here))
    monkeypatch.setattr(connect, "meet", partial(connect.meet, {}))
    group = wire.world()
    assert wire.init() is wire.init(timeout_s=connect.TIMEOUT_S) is group
    with pytest.raises(UsageError, match=r"wire.init\(timeout_s=5\) after the group was made, with \d+ s"):
        wire.init(timeout_s=5)
    group.close()
    assert wire.init(timeout_s=5) is wire.world() is not group


DIFFERENT = """
import itertools, time
f, n = np.ones((4, 3), np.float32), wire.Int8()
calls = {
    "all_reduce": "group.all_reduce(x)", "reduce_scatter": "group.reduce_scatter(x)",
    "all_gather": "group.all_gather(x)", "broadcast": "group.broadcast(x)", "to 1": "group.broadcast(x, root=1)",
    "all_to_all": "group.all_to_all(x[:2])", "uneven": "group.all_to_all_uneven(list(x[:2]))",
    "coded": "group.all_reduce(x, codec=n)", "barrier": "group.barrier()",
}
message = "group.send(x, to=1) if group.rank == 0 else group.receive(x.copy(), source=0)"
arrays = {
    "dtype": f.view(np.int32), "width": f.astype(np.float64), "shape": np.ones((4, 1, 3), np.float32),
    "size": np.ones((6, 3), np.float32), "order": f.astype(">f4"), "long": np.ones((4, 40_000), np.float32),
    "strange": f.view(np.dtype([("a", np.float32)])), "of 15": np.ones((4, 3) + (1,) * 13, np.float32),
}
pairs = {f"{one} {other}": (calls[one], f, calls[other], f) for one, other in itertools.permutations(calls, 2)}
for (one, call), (name, other) in itertools.product(calls.items(), arrays.items()):
    rows = {"all_to_all": ("size",), "uneven": ("shape", "size", "of 15", "long")}
    needless = one == "barrier" or name in rows.get(one, ())
    refused = name in ("order", "strange") and one in ("all_reduce", "reduce_scatter", "coded")
    if not (needless or refused or (name, one) == ("dtype", "coded")):
        pairs[f"{name} of {one}"] = (call, f, call, other)
for op in ("avg", "max", "min", "product"):
    for call in ("group.all_reduce(x{})", "group.reduce_scatter(x{})"):
        pairs[call.format(", op=" + op)] = (call.format(""), f, call.format(f", op={op!r}"), f)
pairs["block"] = (calls["coded"], f, "group.all_reduce(x, codec=wire.Int8(block=2))", f)
pairs["message of dtype"], pairs["message of size"] = [(message, f, message, arrays[k]) for k in ("dtype", "size")]
pairs["two roots of gather"] = (calls["to 1"], f, calls["broadcast"], f)
result = {}
for name, (mine, x, theirs, y) in pairs.items():
    if group.rank:
        mine, x = theirs, y
    begin_s, said = time.perf_counter(), []
    for call in (mine, "group.barrier()"):
        try:
            eval(call)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    result[name] = [*said, time.perf_counter() - begin_s]
    group.close()
    group = wire.init()
"""
TOLD_S = 5.0
"""Far below the timeout."""


@pytest.mark.parametrize("transport", ["SharedMemory", "Tcp"])
def test_calls_that_differ_are_told_to_both(transport: str) -> None:
    """In collective, root, dtype, shape, size, byte order, reduction or codec: on both ranks at the latest with their
    next call, and on one of them with both calls named.
    """
    found = run(2, DIFFERENT, hosts=HOSTS[transport][:2])
    assert len(found[0]) > 120
    for name, first in found[0].items():
        both = [first, found[1][name]]
        sentences = [sentence for *said, _ in both for sentence in said]
        assert any("same calls in the same order" in each or " expects " in each for each in sentences), (name, both)
        assert all(any(said) for *said, _ in both), (name, both)
        assert all(not each or each.startswith("CollectiveError") for each in sentences), (name, both)
        assert max(seconds for *_, seconds in both) < TOLD_S, (name, both)


def test_shapes_are_named() -> None:
    body = "try:\n    group.all_reduce(np.ones([[2, 3], [3, 2]][group.rank]))\nexcept Exception as error:\n"
    said = run(2, body + "    result = str(error)\n")
    called, other = "called all_reduce of 48 bytes (sum of float64) of shape", "of the group all_reduce of 48 bytes"
    assert any(
        f"{called} [2, 3], rank 1 {other}" in each or f"{called} [3, 2], rank 0 {other}" in each for each in said
    )


def test_a_group_is_over_after_a_call_that_failed() -> None:
    """What belongs to that call may still be on its way: a later one must not take it for its own."""
    body = "calls, result = [group.barrier, lambda: group.all_reduce(np.ones(5))], []\n"
    body += "if group.rank == 0:\n    group._transport._timeout_s = 0.0\n"
    body += "else:\n    calls = [lambda: group.receive(np.empty(1), source=0)]\n"
    body += "for call in calls:\n    try:\n        call()\n"
    body += "    except Exception as error:\n        result.append(str(error))\n"
    (late, later), other = run(2, body, hosts=("a", "b"))
    assert late == "TCP: Timed out after 0 s waiting for rank 1 of the group, in barrier of 0 bytes"
    assert later == f"an earlier call of this group has failed ({late}): make another group"
    assert other == ["Connection closed by peer: rank 0 of the group is gone"]


@pytest.mark.parametrize("transport", ["SharedMemory", "Tcp"])
def test_a_rank_that_is_killed_is_named(transport: str) -> None:
    """Survivors are told at once, and by name."""
    dies = POISON + PRELUDE + f"group.barrier()\nos.kill(os.getpid(), {int(signal.SIGKILL)})"
    lives = POISON + PRELUDE + "group.barrier()\ngroup.all_reduce(np.ones(10_000))"
    with tempfile.TemporaryDirectory() as folder:
        processes = started([lives, dies], hosts=HOSTS[transport][:2], folder=folder)
        survivor, victim = said_by(processes)
    assert processes[0].returncode == 1
    assert "rank 1 of the group is gone" in survivor[1]
    assert processes[1].returncode == -signal.SIGKILL
    assert not victim[0]


def board_of(token: bytes, door: bytes) -> tuple[StoreBoard, StoreConnection]:
    """Rank 0's of two, in a store where rank 1 has said that it is behind `door`."""
    listener = sockets.listen_at(LOOPBACK, 0, one_host=True)
    port, fd = listener.getsockname()[1], listener.detach()
    place = Place(0, 2, 0, 2, 0, "shoal")
    store = reach_store(place, LOOPBACK, port, token=token, timeout_s=HANG_S, listen_fd=fd)
    board = StoreBoard(store, "group", timeout_s=2 * HANG_S)
    board.publish("doors/1", door)
    return board, store


def test_who_waits_for_the_connection_of_a_lost_rank_is_woken() -> None:
    """Rank 1 has said where it is, and is gone before it connects: its loss ends the connection to the store."""
    token = b"x" * 32
    board, store = board_of(token, f"127.0.0.1 9 {VERSION}".encode())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Tcp, board, 0, ("a", "b"), address=LOOPBACK, token=token, timeout_s=HANG_S)
        wait_until(lambda: board.published("doors/0"))
        store.give_up("b was lost")
        with pytest.raises(GenerationOver, match="b was lost"):
            waiting.result(HANG_S)


@pytest.mark.parametrize(("door", "version"), [(b"127.0.0.1 9", "1"), (b"127.0.0.1 9 77", "77")])
def test_another_version_of_the_wire_is_named(door: bytes, version: str) -> None:
    """The first one said none."""
    token = b"x" * 32
    board, _ = board_of(token, door)
    with pytest.raises(
        CollectiveError, match=f"rank 1 speaks version {version} of the wire, rank 0 version {VERSION}: "
    ):
        Tcp(board, 0, ("a", "b"), address=LOOPBACK, token=token, timeout_s=HANG_S)


def test_a_root_names_its_own_call_to_another_root() -> None:
    """Whose frame has come before it calls, while it waits for a message that was sent later."""
    body = "group.barrier()\ntry:\n    if group.rank:\n        group.broadcast(np.ones(4), root=1)\n"
    body += "        group.send(np.ones(1), to=0)\n        result = ''\n    else:\n"
    body += "        group.receive(np.empty(1), source=1)\n        group.broadcast(np.ones(4), root=0)\n"
    body += "except Exception as error:\n    result = str(error)\n"
    own, theirs = (f"broadcast of 32 bytes in float64 with root {root}" for root in (0, 1))
    assert run(2, body, hosts=("a", "b"))[0].startswith(f"rank 0 called {own}, rank 1 of the group {theirs}: all ranks")


def test_a_forked_process_is_refused() -> None:
    """It has the same connections."""
    body = "import shoal.errors\npid = os.fork()\nif pid == 0:\n    try:\n        group.barrier()\n"
    body += "    except shoal.errors.CollectiveError:\n        os._exit(7)\n    os._exit(0)\n"
    body += "result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\ngroup.barrier()\n"
    assert run(2, body, hosts=("a", "b")) == [7, 7]


@pytest.mark.slow
def test_who_is_alone_at_the_start_waits_as_long_as_it_was_told() -> None:
    """Also rank 0, which hosts the store, and has to reach it in that time."""
    alone = "from shoal import wire\nwire.init(start_timeout_s=5)"
    with tempfile.TemporaryDirectory() as folder:
        processes = started([alone, "pass"], folder=folder)
        said = said_by(processes)
    assert "rank 0 waited 5 s for rank 1 of 2 ranks" in said[0][1]


def test_a_rank_may_leave_after_its_last_call() -> None:
    """Ranks that are done end while the others still talk to each other."""
    body = "group.barrier()\nif group.rank < 2:\n    import time; time.sleep(0.3)\n"
    body += (
        "    if group.rank: group.send(np.ones(5), to=0)\n    else: group.receive(np.empty(5), source=1)\nresult = 1\n"
    )
    assert run(3, body, hosts=("a", "b", "c")) == [1, 1, 1]


def test_a_root_may_leave_before_others_ask_for_its_content() -> None:
    """Of more than they take in unasked: the rest is still to be sent when the root has ended."""
    body = "x = np.full(1 << 18, 1.0 - group.rank)\nif group.rank:\n    group.receive(np.empty(1), source=0)\n"
    body += "    import select\n    connection = group._transport._peers[0].connection\n"
    body += f"    poll = select.poll()\n    poll.register(connection, select.POLLIN)\n    poll.poll({1000 * HANG_S})\n"
    body += "else:\n    group.send(np.ones(1), to=1)\ngroup.broadcast(x, root=0, out=x)\nresult = x.min()\n"
    body += "if group.rank == 0:\n    group.close()\n"
    assert run(2, body, hosts=("a", "b")) == [1.0, 1.0]
