"""A server over TLS on loopback, in a thread of the test's process, and ways to speak to it."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from shoal.federated.simulation import client_name, data_for, shards_of, width_of
from shoal.federated.task import Task
from shoal.federated.transport import messages
from shoal.federated.transport.client import Client
from shoal.federated.transport.enrol import SERVER, enrol, tls_context
from shoal.federated.transport.host import Host
from shoal.federated.transport.service import Service
from shoal.federated.transport.store import ClientStore, Store
from tests.waiting import NEVER_S, wait_until


@dataclass
class Server:
    """`certificates`: the folder; `told`: what the server said of clients, `said`: of itself."""

    task: Task
    folder: Path
    port: int = 0
    host: Host | None = None
    service: Service | None = None
    told: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def is_up(self) -> bool:
        """Whether it serves."""
        return self.thread is not None and self.thread.is_alive()

    def client(self, number: int, **more: Any) -> Client:
        name = client_name(number)
        data = data_for(self.task, shards_of(self.task)[number], seed=self.task.seed + number)
        store = ClientStore(self.folder / "clients" / name)
        task = copy.deepcopy(self.task)  # clients are processes: here they are threads, each with a module of its own
        more = {"width": width_of(self.task, name), **more}
        return Client(task, data, name=name, url=self.url, store=store, **more)

    async def run_clients(self, *numbers: int) -> None:
        await asyncio.gather(
            *(
                self.client(number).run(tls_context(self.certificates, client_name(number), server=False))
                for number in numbers
            )
        )

    async def ask(
        self, name: str, method: str, where: str, body: Any = b"", *, certificates: Path | None = None
    ) -> tuple[int, Any]:
        """The status and the message that `name` gets for this request."""
        tls = tls_context(certificates or self.certificates, name, server=False)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
            session.request(method, self.url + where, data=body) as response,
        ):
            content = await response.read()
            known = response.content_type == "application/msgpack"
            return response.status, messages.ANSWER.decode(content) if known else content


@contextmanager
def serving(task: Task, folder: Path, *, enrolment: bool = False, grace_s: float = 0.0) -> Iterator[Server]:
    """A server with certificates for the clients of the task; stopped at the end. `enrolment`: it takes tokens."""
    server = Server(task, folder)
    if not server.certificates.exists():
        names = [client_name(number) for number in range(task.federated.clients)]
        enrol(server.certificates, names=names, hosts=["127.0.0.1"])
    loop = asyncio.new_event_loop()
    failures: list[BaseException] = []

    async def main() -> None:
        server.host = Host(task, Store(folder / "server"), clock=time.monotonic, told=server.told.append)
        tls = tls_context(server.certificates, SERVER, server=True, anybody=enrolment)
        folder_of_tokens = server.certificates if enrolment else None
        try:
            service = server.service = Service(
                server.host, farewell_s=NEVER_S, grace_s=grace_s, said=server.said.append, enrolment=folder_of_tokens
            )
            await service.run(tls, address="127.0.0.1", port=0, listening=lambda port: setattr(server, "port", port))
        finally:
            server.host.close()

    def work() -> None:
        asyncio.set_event_loop(loop)
        running = loop.create_task(main())
        server.stop = lambda: loop.call_soon_threadsafe(running.cancel)  # type: ignore[attr-defined]
        try:
            loop.run_until_complete(running)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            failures.append(error)

    thread = server.thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(lambda: server.port or failures)
        yield server
    finally:
        if thread.is_alive():
            server.stop()  # type: ignore[attr-defined]
        thread.join()
    assert not failures, failures


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)
