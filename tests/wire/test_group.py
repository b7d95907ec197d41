"""Groups of ranks without torch: every call gives what NumPy gives, over each transport, and faults are named."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest

from shoal import wire
from shoal.errors import GenerationOver, UsageError
from shoal.launcher import sockets
from shoal.launcher.environment import LOOPBACK, Place
from shoal.launcher.store.connection import reach_store
from shoal.wire import connect
from shoal.wire.tcp import StoreBoard, Tcp
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


FAULTS = {
    "another call": (
        "group.barrier() if group.rank else group.all_reduce(np.ones(4000))",
        "same calls in the same order",
    ),
    "another size": ("group.all_gather(np.ones(2000 + group.rank))", "bytes"),
    "another dtype": ("group.all_reduce(np.ones(4, ['int32', 'float32'][group.rank]))", "(sum of float32)"),
    "another reduction": ("group.all_reduce(np.ones(9000), op=['sum', 'max'][group.rank])", "(max of float64)"),
}


@pytest.mark.parametrize("transport", ["SharedMemory", "Tcp"])
@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_differ_are_named(fault: str, transport: str) -> None:
    call, sentence = FAULTS[fault]
    body = f"try:\n    {call}\n    result = ''\nexcept Exception as error:\n    result = str(error)\n"
    found = run(2, body, hosts=HOSTS[transport][:2])
    assert any(sentence in each for each in found)
    assert all(each for each in found)


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


def test_who_waits_for_the_connection_of_a_lost_rank_is_woken() -> None:
    """Rank 1 has said where it is, and is gone before it connects: its loss ends the connection to the store."""
    token, place = b"x" * 32, Place(0, 2, 0, 2, 0, "shoal")
    listener = sockets.listen_at(LOOPBACK, 0, one_host=True)
    port, fd = listener.getsockname()[1], listener.detach()
    store = reach_store(place, LOOPBACK, port, token=token, timeout_s=HANG_S, listen_fd=fd)
    board = StoreBoard(store, "group", timeout_s=2 * HANG_S)
    board.publish("doors/1", b"127.0.0.1 9")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Tcp, board, 0, ("a", "b"), address=LOOPBACK, token=token, timeout_s=HANG_S)
        wait_until(lambda: board.published("doors/0"))
        store.give_up("b was lost")
        with pytest.raises(GenerationOver, match="b was lost"):
            waiting.result(HANG_S)


@pytest.mark.parametrize("call", ["broadcast", "all_gather"])
def test_numbers_are_not_taken_for_others_of_as_many_bytes(call: str) -> None:
    body = (
        f"try:\n    group.{call}(np.ones(4, ['int32', 'float32'][group.rank]))\n    group.barrier()\n    result = ''\n"
    )
    found = run(2, body + "except Exception as error:\n    result = str(error)\n", hosts=("a", "b"))
    assert f"{call} of 16 bytes in float32" in found[1]
    assert all(found)


def test_two_roots_are_named_at_the_next_call() -> None:
    """A root waits for nobody."""
    body = "try:\n    group.broadcast(np.ones(4), root=group.rank)\n    group.barrier()\n    result = ''\n"
    found = run(2, body + "except Exception as error:\n    result = str(error)\n", hosts=("a", "b"))
    assert any(re.search("called broadcast .*with root", each) for each in found)
    assert all(found)


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
