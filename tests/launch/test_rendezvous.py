"""The ranks' meeting point: who can reach it, and what is said when nobody can."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault, InUse
from shoal.launch import loopback
from shoal.launch.environment import Place
from shoal.launch.rendezvous import interface_for, open_store

FIRST, SECOND = Place(0, 2, 0, 2, 0, "torchrun"), Place(1, 2, 1, 2, 0, "torchrun")
REMOTE = Place(0, 2, 0, 1, 0, "slurm")
LISTENS = "0A"
LOOPBACK_4 = "0100007F"


def listening(port: int) -> list[str]:
    """The local addresses, in the kernel's hexadecimal, on which anybody listens at this port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENS]
    return [address for address, hex_port in ends if int(hex_port, 16) == port]


def free_port() -> int:
    """A port that was free just now."""
    with loopback.listen() as listener:
        return listener.getsockname()[1]


def environ_for(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What every rank finds."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def test_the_launchers_socket_becomes_the_store():
    """Rank 0 serves on the descriptor that it was handed, rank 1 connects, and only loopback listens."""
    listener = loopback.listen()
    environ = environ_for(listener.getsockname()[1])
    store = open_store(FIRST, {**environ, "SHOAL_STORE_FD": str(listener.detach())}, timeout_s=10)
    peer = open_store(SECOND, environ, timeout_s=10)
    store.set("greeting", "hello")
    assert peer.get("greeting") == b"hello"
    assert listening(int(environ["MASTER_PORT"])) == [LOOPBACK_4]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_without_a_launcher_a_local_store_stays_on_loopback(address):
    """Rank 0 binds MASTER_ADDR itself; a loopback address is reachable from this host alone."""
    port = free_port()
    store = open_store(FIRST, environ_for(port, address), timeout_s=10)
    store.set("key", "value")
    assert len(listening(port)) == 1
    assert listening(port)[0] in (LOOPBACK_4, "00000000000000000000000001000000")


def test_a_host_that_calls_itself_loopback_still_serves_other_hosts():
    """Ranks on several hosts, and a MASTER_ADDR that is loopback here (as 127.0.1.1 in /etc/hosts): all interfaces."""
    port = free_port()
    store = open_store(REMOTE, environ_for(port), timeout_s=10)
    store.set("key", "value")
    assert listening(port) == ["00000000"]


def test_a_port_in_use_is_named():
    """Who already listens there wins; the error gives the port and the repair."""
    with loopback.listen() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InUse, match=rf"port {port} .*MASTER_PORT"):
            open_store(FIRST, environ_for(port), timeout_s=5)


def test_a_master_that_does_not_answer_is_named():
    """Rank 1 gives up after its timeout, with address and port; a name without address is refused by rank 0."""
    port = free_port()
    with pytest.raises(EnvironmentFault, match=f"rank 1 could not reach rank 0 at 127.0.0.1:{port}"):
        open_store(SECOND, environ_for(port), timeout_s=1)
    with pytest.raises(EnvironmentFault, match="MASTER_ADDR is 'no such host'"):
        open_store(FIRST, environ_for(port, "no such host"), timeout_s=1)


def test_torchruns_agent_hosts_the_store_and_attempts_do_not_mix():
    """With the agent's store every rank is a client, and a restart does not see the keys of the attempt before."""
    listener = loopback.listen()
    environ = environ_for(listener.getsockname()[1])
    agent = open_store(FIRST, {**environ, "SHOAL_STORE_FD": str(listener.detach())}, timeout_s=10)
    elastic = {**environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"}
    first = open_store(FIRST, {**elastic, "TORCHELASTIC_RESTART_COUNT": "0"}, timeout_s=10)
    again = open_store(FIRST, {**elastic, "TORCHELASTIC_RESTART_COUNT": "1"}, timeout_s=10)
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
    assert interface_for(REMOTE, {}) is None
