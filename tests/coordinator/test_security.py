"""A stranger on the network without the token can neither join, read, kill nor stall, while honest replicas train."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.coordinator.client import Address, Client, Connection
from shoal.coordinator.service import Limits, coordinator_in
from shoal.errors import EnvironmentFault
from shoal.launcher import frames, handshake
from shoal.resilience.events import Expel, Heartbeat, Join, Look, View
from shoal.resilience.membership import Rules
from tests.coordinator.services import Running, first_generation, running
from tests.waiting import HANG_S, wait_until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("job"), "--max", "1", "--start", "0") as found:
        yield found


@pytest.fixture(scope="module")
def honest(service: Running) -> Iterator[Client]:
    """A replica that trains all the while."""
    with Client(service.address, "honest") as client:
        first_generation(client)
        yield client


def refused(connection: socket.socket) -> bool:
    """Whether it hears no more than that it does not know the token, and is closed."""
    connection.settimeout(HANG_S)
    with contextlib.suppress(ConnectionResetError):
        if frames.receive(connection, most_bytes=512) != msgspec.msgpack.encode(handshake.Refusal()):
            return False
        return connection.recv(1) == b""
    return True


def knock(service: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), 10)


def is_closed(connection: socket.socket) -> bool:
    """Does the coordinator close it, after at most one frame of its own?"""
    connection.settimeout(Limits().handshake_s + HANG_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def still_trains(service: Running, honest: Client) -> bool:
    """The generation stands, and a step is committed."""
    connection = Connection(service.address)
    before = connection.ask(Look())
    assert isinstance(before, View)
    honest.applied(stop=8 * (before.committed + 1))
    views: list[View] = []

    def look() -> bool:
        now = connection.ask(Look())
        assert isinstance(now, View)
        views.append(now)
        return now.committed > before.committed

    wait_until(look)
    connection.close()
    return views[-1].members == ("honest",) and views[-1].number == before.number


def test_a_wrong_token_is_refused(service: Running, honest: Client) -> None:
    """With a sentence for whoever made a mistake, and nothing else for anybody."""
    with pytest.raises(handshake.TokenRefused, match="use the token file of the job"):
        Connection(Address("127.0.0.1", service.port, b"x" * 64))
    with Client(Address("127.0.0.1", service.port, b"x" * 64), "b") as client, pytest.raises(handshake.TokenRefused):
        client.generation(HANG_S)
    assert still_trains(service, honest)


@pytest.mark.parametrize("message", [Look(), Join("stranger"), Expel("honest", "no reason"), Heartbeat("honest", 0)])
def test_nothing_is_answered_before_the_proof(service: Running, honest: Client, message: msgspec.Struct) -> None:
    """A message in the place of the proof ends the connection, and changes nothing."""
    with knock(service) as connection:
        frames.receive(connection, most_bytes=512)
        connection.sendall(frames.encode(message))
        connection.settimeout(HANG_S)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert still_trains(service, honest)


@pytest.mark.parametrize(
    "noise",
    [b"\x00" * 64, b"\xff" * 1024, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", (1 << 31).to_bytes(4, "big") + b"x", b""],
)
def test_garbage_and_oversize_frames_end_the_connection(service: Running, honest: Client, noise: bytes) -> None:
    """Whatever comes instead of a proof; half a connection is given the handshake's time and no more."""
    with knock(service) as connection:
        connection.sendall(noise)
        if not noise:
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    assert still_trains(service, honest)


def test_a_recorded_proof_is_worth_nothing(service: Running, honest: Client) -> None:
    """What an honest peer once sent does not open another connection."""
    with knock(service) as connection:
        greeting = frames.decode(frames.receive(connection, most_bytes=512), handshake.HELLOS)
        recorded = frames.encode(handshake.prove(service.token, greeting))
    with knock(service) as connection:
        frames.receive(connection, most_bytes=512)
        connection.sendall(recorded + frames.encode(Expel("honest", "replayed")))
        assert refused(connection)
    assert still_trains(service, honest)


def test_many_silent_strangers_stall_nobody(tmp_path: Path) -> None:
    """Three times as many connections as strangers may hold, each with half a frame: honest replicas still come in."""
    limits = Limits(strangers=16)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(coordinator_in(tmp_path, Rules(start_s=0.0), told=lambda _: None, limits=limits))
        for _ in range(3 * limits.strangers):
            connection = stack.enter_context(socket.create_connection((address.host, address.port)))
            with contextlib.suppress(OSError):  # closed already, where there are newer ones
                connection.sendall(b"\x00\x00")
        first_generation(stack.enter_context(Client(address, "honest")))


@pytest.mark.slow
def test_one_byte_at_a_time_is_cut_off(service: Running, honest: Client) -> None:
    """A slow-loris: the limit holds for the handshake as a whole, not from byte to byte."""
    with knock(service) as connection:
        frames.receive(connection, most_bytes=512)
        connection.settimeout(1)
        drops = (100).to_bytes(4, "big") + b"\x83" * 100  # a frame of legal size that never ends
        sent, closed, wait = 0, False, threading.Event()
        while not closed and sent < len(drops):
            try:
                connection.sendall(drops[sent : sent + 1])
                sent += 1
                wait.wait(0.2)
                connection.settimeout(0.01)
                closed = connection.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
        assert closed
        assert sent > 4
    assert still_trains(service, honest)


@pytest.mark.parametrize("body", [b"\x81\xa4kind\xa3Nop", b"\xc1", b"\x81\xa4kind\xa4Join", b"\x91" * 5000])
def test_a_peer_with_the_token_that_talks_nonsense_is_closed(service: Running, honest: Client, body: bytes) -> None:
    """Unknown kinds, broken and deeply nested bodies; the service itself goes on."""
    connection = Connection(service.address)
    raw = connection._socket
    raw.sendall(len(body).to_bytes(4, "big") + body)
    assert is_closed(raw)  # pyright: ignore[reportArgumentType]
    assert still_trains(service, honest)


@pytest.mark.slow
def test_a_peer_that_does_not_read_is_closed(service: Running, honest: Client) -> None:
    """It asks and never takes the answers: the coordinator's memory does not grow, and others are served."""
    connection = Connection(service.address)
    raw = connection._socket
    raw.settimeout(HANG_S)

    def ask_for_ever() -> None:
        for _ in range(4000):
            raw.sendall(frames.encode(Look()) * 1000)

    with pytest.raises(OSError):
        ask_for_ever()
    assert still_trains(service, honest)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A file of mode 0644, and a token that is short."""
    path = tmp_path / "token"
    path.write_text("t" * 64)
    path.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="can be read by others"):
        handshake.read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(EnvironmentFault, match="has 5 bytes"):
        handshake.read_token(path)


def test_an_impostor_of_the_coordinator_is_found_out() -> None:
    """Who listens in its place, without the token, cannot prove itself to a replica."""
    greeting = handshake.hello()
    proof = handshake.prove(b"t" * 32, greeting)
    answer = handshake.welcome(b"x" * 32, greeting, proof)
    assert answer is None
    with pytest.raises(handshake.TokenRefused, match="does not know this job's token"):
        handshake.check_welcome(b"t" * 32, greeting, proof, handshake.Welcome(proof.mac))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl to make a certificate")
def test_tls_carries_the_same_protocol(tmp_path: Path) -> None:
    """A client that trusts the certificate trains; one that does not, and one without TLS, get nowhere."""
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1 "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/key.pem -out {tmp_path}/certificate.pem".split(),
        check=True,
        capture_output=True,
    )
    certificate = str(tmp_path / "certificate.pem")
    options = ("--address", "127.0.0.1", "--certificate", certificate, "--key", str(tmp_path / "key.pem"))
    with running(tmp_path, "--start", "0", *options) as service:
        trusted = Address("127.0.0.1", service.port, service.token, certificate)
        with Client(trusted, "a") as client:
            first_generation(client)
        with pytest.raises(ssl.SSLCertVerificationError):
            Connection(Address("127.0.0.1", service.port, service.token, ssl.get_default_verify_paths().cafile or ""))
        plain = socket.create_connection(("127.0.0.1", service.port), 10)
        plain.sendall(b"\x00" * 64)
        assert is_closed(plain)
        plain.close()
