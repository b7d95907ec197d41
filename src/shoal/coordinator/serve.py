"""The coordinator as a program, and as a thread of the launcher.

`shoal coordinator serve` checks where it may listen, and runs the service. A launcher runs it in a thread, on loopback,
for its one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.coordinator.client import Address
from shoal.coordinator.journal import Journal
from shoal.coordinator.service import Limits, Service
from shoal.errors import EnvironmentFault, InUse, UsageError
from shoal.launch.environment import LOOPBACK
from shoal.launch.handshake import make_token
from shoal.resilience.detection import Divergence, Slow
from shoal.resilience.events import Decision
from shoal.resilience.membership import Rules

BACKLOG = 4096


def serve(
    rules: Rules,
    *,
    address: str,
    port: int,
    journal: Path,
    token: Path,
    certificate: Path | None = None,
    key: Path | None = None,
    limits: Limits = Limits(),
    listening: Callable[[str, int], None],
) -> None:
    """Serves until SIGTERM or Ctrl-C. `listening` hears the address and the port (0: any free one) once it does.

    Raises `UsageError` for an address beyond loopback without a certificate, `InUse` for a port or a journal that
    another process holds, and `EnvironmentFault`.
    """
    tls = _tls(address, certificate, key)
    secret = make_token(token)
    with contextlib.closing(listen(address, port)) as listener, contextlib.closing(Journal(journal)) as records:
        service = Service(rules, records, token=secret, limits=limits)
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_until_signalled(service, listener, tls, listening))


async def _until_signalled(
    service: Service, listener: socket.socket, tls: ssl.SSLContext | None, listening: Callable[[str, int], None]
) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    listening(*listener.getsockname()[:2])  # who hears it may send a signal at once
    await service.run(listener, tls=tls)


def _tls(address: str, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        if not ipaddress.ip_address(_resolved(address)).is_loopback:
            raise UsageError(
                f"the coordinator would listen on {address} without TLS: beyond loopback everybody on the way could "
                "read and change what ranks say; give --certificate and --key"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise EnvironmentFault(
            f"the certificate {certificate} and its key cannot be used ({error}): both are PEM files, "
            "the key without a passphrase"
        ) from error
    return context


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `InUse` and `EnvironmentFault`."""
    host = _resolved(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        kind = InUse if error.errno == errno.EADDRINUSE else EnvironmentFault
        raise kind(f"the coordinator cannot listen on {address}:{port} ({error.strerror}): give another") from error
    return listener


def _resolved(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise EnvironmentFault(f"{address} has no address ({error}): give one of this host") from error


@contextlib.contextmanager
def coordinator_in(
    folder: Path,
    rules: Rules,
    *,
    told: Callable[[Decision | Divergence | Slow | Exception], None],
    journal: Callable[[Path], Journal] = Journal,
) -> Iterator[Address]:
    """Serves until the end of the block, with its token in `folder`, and what `journal` opens there.

    `told` hears, in the coordinator's thread, of decisions, of verdicts on fingerprints, of slow members, and of the
    fault that ended the service, such as a full disk. Raises `EnvironmentFault` where it cannot start.
    """
    token, records = make_token(folder / "token"), journal(folder / "journal")
    with contextlib.closing(records), contextlib.closing(listen(LOOPBACK, 0)) as listener:
        service = Service(rules, records, token=token, told=told)
        loop = asyncio.new_event_loop()
        serving = loop.create_task(service.run(listener))

        def serve() -> None:
            with contextlib.closing(loop):
                try:
                    loop.run_until_complete(serving)
                except asyncio.CancelledError:
                    pass
                except Exception as error:
                    told(error)

        thread = threading.Thread(target=serve, name="shoal-coordinator", daemon=True)
        thread.start()
        try:
            yield Address(LOOPBACK, listener.getsockname()[1], token)
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(serving.cancel)
            thread.join()
