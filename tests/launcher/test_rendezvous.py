"""The ranks' meeting point: who can reach it, what a wait says, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shoal.errors import CollectiveError, EnvironmentFault, InUse
from shoal.launcher import rendezvous, sockets
from shoal.launcher.environment import Place
from shoal.launcher.rendezvous import Rendezvous, interface_for, open_store, tell_failure
from shoal.launcher.store import connection
from tests.ports import free_port
from tests.waiting import HANG_S

FIRST, SECOND = Place(0, 2, 0, 2, 0, "torchrun"), Place(1, 2, 1, 2, 0, "torchrun")
ALONE, REMOTE = Place(0, 1, 0, 1, 0, "torchrun"), (Place(0, 2, 0, 1, 0, "slurm"), Place(1, 2, 0, 1, 1, "slurm"))
LISTENS = "0A"
LOOPBACK_4 = "0100007F"
SOURCE = Path(__file__).parents[2] / "src"


def listening(port: int) -> list[str]:
    """The local addresses, in the kernel's hexadecimal, on which anybody listens at this port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENS]
    return [address for address, hex_port in ends if int(hex_port, 16) == port]


def environ_for(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What every rank finds."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}


def opened(*pairs: tuple[Place, dict[str, str]]) -> list[Store]:
    """The stores of all ranks, opened at the same time."""
    with ThreadPoolExecutor() as pool:
        return [future.result() for future in [pool.submit(open_store, *pair, timeout_s=HANG_S) for pair in pairs]]


def met(timeout_s: float) -> tuple[Rendezvous, Rendezvous]:
    """Two ranks whose stores are open."""
    port = free_port()
    stores = opened((FIRST, environ_for(port)), (SECOND, environ_for(port)))
    one, two = (
        Rendezvous(store, place, timeout_s=timeout_s) for store, place in zip(stores, (FIRST, SECOND), strict=True)
    )
    return one, two


def test_the_launchers_socket_becomes_the_store():
    """Rank 0 serves on the descriptor that it was handed, rank 1 connects, and only loopback listens."""
    listener = sockets.listen_on_loopback()
    environ = environ_for(listener.getsockname()[1])
    store, peer = opened((FIRST, {**environ, "SHOAL_STORE_FD": str(listener.detach())}), (SECOND, environ))
    store.set("greeting", "hello")
    assert peer.get("greeting") == b"hello"
    assert listening(int(environ["MASTER_PORT"])) == [LOOPBACK_4]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_without_a_launcher_a_local_store_stays_on_loopback(address):
    """Rank 0 binds MASTER_ADDR itself; a loopback address is reachable from this host alone."""
    port = free_port()
    store = open_store(ALONE, environ_for(port, address), timeout_s=HANG_S)
    store.set("key", "value")
    assert len(listening(port)) == 1
    assert listening(port)[0] in (LOOPBACK_4, "00000000000000000000000001000000")


def test_a_host_that_calls_itself_loopback_still_serves_other_hosts():
    """Ranks on several hosts, and a MASTER_ADDR that is loopback here (as 127.0.1.1 in /etc/hosts): all interfaces."""
    port = free_port()
    store, _ = opened(*((place, environ_for(port)) for place in REMOTE))
    store.set("key", "value")
    assert listening(port) == ["00000000"]


def test_a_port_in_use_is_named():
    """Who already listens there wins; the error gives the port and the repair."""
    with sockets.listen_on_loopback() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InUse, match=rf"port {port} .*MASTER_PORT"):
            open_store(FIRST, environ_for(port), timeout_s=HANG_S)


def test_a_rank_0_that_does_not_answer_is_named():
    """Rank 1 gives up after its timeout, with address, port and obstacle; rank 0 refuses a name without address."""
    port = free_port()
    with pytest.raises(
        CollectiveError, match=rf"rank 1 waited 1 s in vain for rank 0 at 127.0.0.1:{port} \(connection"
    ):
        open_store(SECOND, environ_for(port), timeout_s=1)
    with pytest.raises(EnvironmentFault, match="MASTER_ADDR is 'no such host'"):
        open_store(FIRST, environ_for(port, "no such host"), timeout_s=1)


def test_a_listener_that_never_answers_is_no_endless_wait():
    """A connection that is accepted and then ignored (rank 0 is stopped) ends at the timeout, too."""
    with sockets.listen_on_loopback() as silent, pytest.raises(CollectiveError, match="it does not answer"):
        open_store(SECOND, environ_for(silent.getsockname()[1]), timeout_s=1)


@pytest.mark.slow
def test_ranks_that_never_come_are_named():
    """Rank 0 of 4 is alone with rank 2: both name ranks 1 and 3."""
    environ = environ_for(free_port())
    places = [Place(rank, 4, rank, 4, 0, "torchrun") for rank in (0, 2)]
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(open_store, place, environ, timeout_s=4) for place in places]
    for place, end in zip(places, ends, strict=True):
        with pytest.raises(
            CollectiveError, match=f"rank {place.rank} waited .* for ranks 1, 3 of 4 to reach the store"
        ):
            end.result()


def test_a_wait_is_reported_before_it_ends(monkeypatch, capfd):
    """The first sentence comes long before the timeout, names who is missing, and the wait goes on after it."""
    monkeypatch.setattr(connection, "SAY_AFTER_S", 0.2)
    one, two = met(HANG_S)
    found: Future[str] = Future()
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(rank.announce, "slow", found.result) for rank in (one, two)]
        try:
            while "rank 1 waits for rank 0, which finds out and tells the others: slow" not in capfd.readouterr().err:
                assert not ends[1].done()
        finally:
            found.set_result("it")
    assert [end.result() for end in ends] == ["it", "it"]


class SilentMPI:
    """An MPI whose other ranks never come: the request is never done."""

    BYTE = None

    @property
    def COMM_WORLD(self) -> SilentMPI:
        return self

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 2

    def Ibcast(self, message: object, root: int) -> SilentMPI:
        return self

    def Test(self) -> bool:
        return False


def test_a_rank_that_never_comes_over_mpi_is_no_endless_wait(monkeypatch, capfd):
    """The wait for the address over MPI says what it waits for, and ends."""
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, SilentMPI())
    monkeypatch.setattr(rendezvous, "mpi_is_there", lambda: True)
    monkeypatch.setattr(connection, "SAY_AFTER_S", 0.05)
    with pytest.raises(CollectiveError, match=r"rank 1 waited 0\.2 s in vain for rank 0, to meet over MPI"):
        open_store(Place(1, 2, 1, 2, 0, "mpi"), {}, timeout_s=0.2)
    assert "rank 1 waits for rank 0, to meet over MPI, 0.05 of at most 0.2 s" in capfd.readouterr().err


def test_an_mpi4py_without_an_mpi_library_is_one_sentence(monkeypatch):
    """Its import raises; the rank says what is missing."""

    def without_library(name: str) -> None:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", without_library)
    monkeypatch.setattr(rendezvous, "mpi_is_there", lambda: True)
    with pytest.raises(EnvironmentFault, match=r"not start \(cannot load MPI library\): .* pip install mpich"):
        open_store(Place(1, 2, 1, 2, 0, "mpi"), {}, timeout_s=0.2)


def test_a_rank_that_failed_tells_those_that_wait_for_it():
    """Rank 1 fails before the barrier that rank 0 waits at: rank 0 ends at once, with rank 1's sentence."""
    port = free_port()
    first, _ = opened((FIRST, environ_for(port)), (SECOND, environ_for(port)))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(Rendezvous(first, FIRST, timeout_s=HANG_S).barrier, "the end")
        tell_failure(SECOND, environ_for(port), "own.toml: run.steps: found 0")
        with pytest.raises(CollectiveError, match=r"^rank 1 failed: own.toml: run.steps: found 0$"):
            waiting.result()


def test_a_rank_0_that_failed_before_it_hosted_the_store_still_tells():
    """Rank 1 waits for a store that is not there; rank 0 refuses, hosts it just long enough, and is heard."""
    environ = environ_for(free_port())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(open_store, SECOND, environ, timeout_s=HANG_S)
        tell_failure(FIRST, environ, "the run directory is in use")
        with pytest.raises(CollectiveError, match="rank 0 failed: the run directory is in use"):
            waiting.result()


def test_a_failure_is_not_told_to_another_run():
    """Rank 0 that finds another run's store at its port leaves that run alone."""
    environ = environ_for(free_port())
    other = open_store(ALONE, environ, timeout_s=HANG_S)
    other.set("barrier/the store/0", "elsewhere 1")
    tell_failure(FIRST, environ, "the port is in use")
    assert not other.check(["failed"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_at_once(number):
    """A rank that waits for rank 0 is ended by the signal, without a word about Python's own frames."""
    script = """
import os
from shoal.launcher.store import connection as wait
from shoal.launcher.environment import place_from
from shoal.launcher.rendezvous import open_store
from shoal.launcher.signals import end_at_once
wait.SAY_AFTER_S = 0.2
with end_at_once():
    open_store(place_from(os.environ), os.environ, timeout_s=3600)
"""
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with sockets.listen_on_loopback() as silent:
        environ = {**os.environ, **place, **environ_for(silent.getsockname()[1]), "PYTHONPATH": str(SOURCE)}
        rank = subprocess.Popen([sys.executable, "-c", script], env=environ, stderr=subprocess.PIPE, text=True)
        assert rank.stderr is not None
        assert rank.stderr.readline().startswith("rank 1 waits for rank 0 at 127.0.0.1:")
        rank.send_signal(number)
        _, rest = rank.communicate(timeout=HANG_S)
    assert rank.returncode == -number
    assert "Traceback" not in rest


def test_torchruns_agent_hosts_the_store_and_attempts_do_not_mix():
    """With the agent's store every rank is a client, and a restart does not see the keys of the attempt before."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = environ_for(agent.port)
    elastic = {**environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"}
    first = open_store(ALONE, {**elastic, "TORCHELASTIC_RESTART_COUNT": "0"}, timeout_s=HANG_S)
    again = open_store(ALONE, {**elastic, "TORCHELASTIC_RESTART_COUNT": "1"}, timeout_s=HANG_S)
    first.set("key", "old")
    assert not again.check(["key"])
    assert not agent.check(["key"])


def test_gloo_stays_on_loopback_while_all_ranks_share_a_host():
    """Set where it is unset and all ranks are here; never over the user's choice, never for ranks elsewhere."""
    environ: dict[str, str] = {}
    assert interface_for(FIRST, environ) == environ["GLOO_SOCKET_IFNAME"]
    assert environ["GLOO_SOCKET_IFNAME"] in [name for _, name in socket.if_nameindex()]
    chosen = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert interface_for(FIRST, chosen) == "eth7"
    assert interface_for(REMOTE[0], {}) is None
