"""Over TLS on loopback: whole runs, and everything that a client may do wrong is refused and named."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from blake3 import blake3

from shoal.assembly.federated import serve
from shoal.errors import EnvironmentFault, InUse, UsageError
from shoal.federated.rounds import Ticket
from shoal.federated.secure.messages import Sealed
from shoal.federated.simulation import Simulation, client_name, data_for, shards_of
from shoal.federated.transport import messages, service
from shoal.federated.transport.client import Client
from shoal.federated.transport.enrol import SERVER, enrol, enrol_by_token, new_tokens, tls_context
from shoal.federated.transport.host import strategy_of
from shoal.federated.transport.service import Service
from shoal.federated.transport.store import ClientStore
from shoal.launcher.sockets import listen_on_loopback
from tests.federated.tasks import run_file, task
from tests.federated.transport.serving import Server, packed, serving
from tests.waiting import HANG_S, NEVER_S, wait_until

CLOSE = 2e-5
"""Clients train alone here and together in the simulation; secret sums are rounded to 20 bits."""


def task_of(steps: int = 2, **tables: Any) -> Any:
    federated = {"clients": 3, "local_steps": 2, "evaluate_every": 9, **tables.pop("federated", {})}
    return task(run={"steps": steps}, devices={"together": 1}, federated=federated, **tables)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"secure_aggregation": {}},
        {"federated": {"kind": "fedbuff", "buffer": 3}},
        {"federated": {"kind": "clustered", "clusters": 2}},
        {"federated": {"kind": "heterofl"}, "model": {"hidden": [12]}},
    ],
)
def test_a_run_over_the_network_makes_the_model_of_the_simulation(tables: dict[str, Any], tmp_path: Path) -> None:
    """By rounds in the clear and in secret; without rounds there is no one order, and it ends all the same."""
    one = task_of(**tables)
    simulation = Simulation(one)
    with serving(one, tmp_path) as server:
        asyncio.run(server.run_clients(0, 1, 2))
        assert server.host is not None
        found, told = server.host.server.model, server.told
    assert told == []
    if not one.federated.asynchronous:
        simulation.run()
        assert torch.allclose(found, simulation.server.model, rtol=0.0, atol=CLOSE)
    assert server.host.server.version == 2


@pytest.mark.slow
def test_a_server_stays_until_every_client_has_heard_that_the_run_is_over(tmp_path: Path) -> None:
    """One that comes late, too, and one whose answer was lost; then it ends, however long it would have waited."""
    one = task_of(steps=1, federated={"clients": 2, "least": 1, "deadline_s": 0.5})
    with serving(one, tmp_path, grace_s=NEVER_S) as server:

        async def play() -> None:
            late = client_name(1)
            said = messages.Join(5, one.trainer.layout.fingerprint, strategy_of(one))
            await server.ask(late, "POST", "/join", packed(said))
            await server.run_clients(0)
            assert server.is_up()
            assert server.said[0].startswith("waiting for 2 clients to hear that the run is over")
            for _ in range(2):
                assert (await server.ask(late, "POST", "/work"))[1] == messages.Over()

        asyncio.run(play())
        assert server.is_up()
        assert server.service is not None
        server.service.grace_s = 0.0
        wait_until(lambda: not server.is_up())


async def farewell(meanwhile: Callable[[asyncio.Task[None], Service], object]) -> list[str]:
    """A run is over, and a client has not heard so; what the server said."""
    rounds, said = SimpleNamespace(over=True, present={"a": 1}), []
    host: Any = SimpleNamespace(rounds=rounds, tick=str)
    service = Service(host, farewell_s=NEVER_S, said=said.append)
    service._failed = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service._rounds())
    await asyncio.sleep(0)
    meanwhile(task, service)
    await asyncio.wait_for(task, HANG_S)
    return said


def test_a_server_whose_run_is_over_ends_by_ctrl_c_and_by_a_full_disk() -> None:
    """The first ends the wait alone, as all models are made; the second is raised."""

    def fail(task: asyncio.Task[None], service: Service) -> None:
        assert service._failed is not None
        service._failed.set_exception(OSError("no space left"))

    assert len(asyncio.run(farewell(lambda task, service: task.cancel()))) == 1
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(farewell(fail))


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    enrol(tmp_path, names=[], hosts=["127.0.0.1"])
    tls = tls_context(tmp_path, SERVER, server=True)
    with listen_on_loopback() as listener:
        port = listener.getsockname()[1]
        host: Any = SimpleNamespace()
        with pytest.raises(InUse, match=f"cannot listen on 127.0.0.1:{port} .Address already in use.: give another"):
            asyncio.run(Service(host).run(tls, address="127.0.0.1", port=port, listening=str))


def test_a_full_disk_is_a_sentence_that_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file it was: a write does not say of which."""

    async def write(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Service, "run", write)
    enrol(tmp_path / "certificates", names=[], hosts=["127.0.0.1"])
    run = run_file(run={"directory": str(tmp_path / "run")})
    with pytest.raises(EnvironmentFault, match=rf"{tmp_path}/run/federated.*disk is full.* goes on with round 1$"):
        serve(run, certificates=tmp_path / "certificates", address="127.0.0.1", port=0, listening=str, told=str)


def upload(model: torch.Tensor, *, samples: int, scale: float = 1.0, value: float | None = None) -> bytes:
    """The bytes of an update."""
    delta = torch.full_like(model, scale if value is None else value)
    header = messages.UpdateHeader(parts=(messages.part_of("update.0", delta),), samples=samples, steps=1)
    return messages.frame_head(header) + bytes(messages.bytes_of(delta))


async def joined(server: Server, name: str, samples: int) -> messages.Train:
    said = messages.Join(samples, server.task.trainer.layout.fingerprint, strategy_of(server.task))
    status, _ = await server.ask(name, "POST", "/join", packed(said))
    assert status == 200
    while True:
        _, answer = await server.ask(name, "POST", "/work")
        if isinstance(answer, messages.Train):
            return answer
        await asyncio.sleep(0.05)


def where_of(train: messages.Train, content: bytes, *, offset: int = 0, total: int | None = None) -> str:
    digest = blake3(content).hexdigest()
    size = len(content) if total is None else total
    return f"/upload/{train.ticket.version}/{train.ticket.number}?offset={offset}&total={size}&digest={digest}"


def test_bad_updates_are_refused_and_their_clients_named(tmp_path: Path) -> None:
    """Not finite, too large a norm, other samples than it joined with, another length, changed on the way, too long."""
    one = task_of(federated={"largest_norm": 1.0, "cohort": 1, "clients": 1, "least": 1, "deadline_s": HANG_S})
    model = one.model
    good = upload(model, samples=5, value=1e-3)
    cases = {
        "is not finite": upload(model, samples=5, value=float("nan")),
        "has norm": upload(model, samples=5, value=0.1),
        "joined with 5 samples, and now says 6": upload(model, samples=6, value=1e-3),
        "is expected": upload(model[:-1], samples=5, value=1e-3),
        "header": b"\0" * 8,
        "changed on the way": good,
        "at most": good,
    }
    for says, content in cases.items():
        with serving(one, tmp_path / says.replace(" ", "-")) as server:

            async def play(server: Server = server, says: str = says, content: bytes = content) -> None:
                train = await joined(server, client_name(0), 5)
                total = 1 << 40 if says == "at most" else None
                where = where_of(train, content + (b"x" if says == "changed on the way" else b""), total=total)
                if says == "changed on the way":
                    where = where.replace(f"total={len(content) + 1}", f"total={len(content)}")
                _, answer = await server.ask(client_name(0), "PUT", where, content)
                assert isinstance(answer, messages.Ended)
                assert not answer.counted
                assert says in answer.reason

            asyncio.run(play())
            assert len(server.told) >= 1
            assert client_name(0) in server.told[0]
            assert says in server.told[0]


def test_an_upload_goes_on_where_it_broke_and_counts_once(tmp_path: Path) -> None:
    """The first half, then what the server has, then the rest; the same again is counted already."""
    one = task_of(federated={"cohort": 2, "clients": 2})
    with serving(one, tmp_path) as server:

        async def play() -> None:
            name = client_name(0)
            other = asyncio.create_task(joined(server, client_name(1), 5))
            train = await joined(server, name, 5)
            await other
            content = upload(one.model, samples=5, value=1e-3)
            half = len(content) // 2
            _, answer = await server.ask(name, "PUT", where_of(train, content), content[:half])
            assert answer == messages.Received(half)
            status, answer = await server.ask(name, "PUT", where_of(train, content), content)
            assert (status, answer) == (409, messages.Received(half))
            where = where_of(train, content, offset=half)
            _, answer = await server.ask(name, "PUT", where, content[half:] + b"more")
            assert isinstance(answer, messages.Refusal)
            _, known = await server.ask(name, "GET", where.partition("?")[0])
            assert isinstance(known, messages.Received)
            rest = where_of(train, content, offset=known.size)
            _, answer = await server.ask(name, "PUT", rest, content[known.size :])
            assert answer == messages.Ended(True)
            _, answer = await server.ask(name, "PUT", where_of(train, content), content)
            assert answer == messages.Ended(True)
            assert server.host is not None
            assert server.host.rounds.open is not None
            assert len(server.host.rounds.open.counted) == 1

        asyncio.run(play())


def test_messages_that_are_none_are_refused_and_named(tmp_path: Path) -> None:
    """Garbage, another message, a round that is not; none of them ends the server."""
    one = task_of()
    with serving(one, tmp_path) as server:

        async def play() -> None:
            name = client_name(0)
            for where, body in (
                ("/join", b"garbage"),
                ("/join", packed(messages.Look())),
                ("/secret/0/0", b"\xc1" * 100),
                ("/upload/0/0?offset=x&total=1&digest=1", b""),
            ):
                method = "PUT" if where.startswith("/upload") else "POST"
                status, answer = await server.ask(name, method, where, body)
                assert status == 400, where
                assert isinstance(answer, messages.Refusal)
            status, answer = await server.ask(name, "POST", "/work")
            assert isinstance(answer, messages.Refusal)
            assert answer.join_first
            status, _ = await server.ask(name, "GET", "/model/99")
            assert status == 404
            status, _ = await server.ask(name, "GET", "/model/..%2f..%2fserver.key")
            assert status == 404

        asyncio.run(play())
        assert all(f"client {client_name(0)}" in sentence for sentence in server.told)


def test_a_client_without_the_right_certificate_gets_nothing(tmp_path: Path) -> None:
    """Of another authority, the server's own, or none at all; and a client does not talk to another server."""
    one = task_of()
    enrol(tmp_path / "others", names=[client_name(0)], hosts=["127.0.0.1"])
    with serving(one, tmp_path) as server:
        (tmp_path / "mixed").mkdir()
        for file in ("authority.pem",):
            (tmp_path / "mixed" / file).write_bytes((server.certificates / file).read_bytes())
        for end in ("pem", "key"):
            content = (tmp_path / "others" / f"{client_name(0)}.{end}").read_bytes()
            (tmp_path / "mixed" / f"{client_name(0)}.{end}").write_bytes(content)

        async def refused(name: str, folder: Path) -> None:
            with pytest.raises((aiohttp.ClientError, OSError)):
                await server.ask(name, "POST", "/alive", certificates=folder)

        async def play() -> None:
            await refused(client_name(0), tmp_path / "mixed")
            await refused("server", server.certificates)
            client = server.client(0, patience_s=0.0)
            with pytest.raises(EnvironmentFault, match="certificate of client client-000000"):
                await client.run(tls_context(tmp_path / "mixed", client_name(0), server=False))
            with pytest.raises(EnvironmentFault, match="is not a server of this run"):
                await client.run(tls_context(tmp_path / "others", client_name(0), server=False))

        asyncio.run(play())


def test_a_client_enrols_by_a_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key never leaves its folder; the certificate is of the server's authority; nobody else gets in."""
    monkeypatch.setattr(service, "REFUSAL_S", 0.0)
    with serving(task(federated={"clients": 2}), tmp_path, enrolment=True) as server:
        token, late = (new_tokens(server.certificates, count=1, hours=hours)[0] for hours in (1, -1))
        mine, where = tmp_path / "mine", f"127.0.0.1:{server.port}"
        mine.mkdir()
        (mine / "authority.pem").write_bytes((server.certificates / "authority.pem").read_bytes())
        for wrong, name in (("x" * 32, "new"), (late, "new"), (token, "client-000000"), (token, "../new")):
            with pytest.raises(UsageError):
                enrol_by_token(mine, server=where, name=name, token=wrong)
        assert token not in (server.certificates / "tokens.json").read_text()
        assert enrol_by_token(mine, server=where, name="new", token=token) == mine / "new.pem"
        assert (mine / "new.key").stat().st_mode & 0o777 == 0o600
        assert not (server.certificates / "new.key").exists()
        with pytest.raises(UsageError, match="was used"):
            enrol_by_token(mine, server=where, name="other", token=token)
        status, _ = asyncio.run(server.ask("new", "POST", "/alive", certificates=mine))
        assert status == 204
        assert asyncio.run(without_certificate(server)) == 403
        assert any("client new is enrolled" in line for line in server.told)
    with serving(task(federated={"clients": 2}), tmp_path / "closed") as closed:
        (mine / "authority.pem").write_bytes((closed.certificates / "authority.pem").read_bytes())
        with pytest.raises(EnvironmentFault, match="is it a server with --enrol"):
            enrol_by_token(mine, server=f"127.0.0.1:{closed.port}", name="third", token=token)


def test_messages_of_many_pieces_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client reads an answer of 1 MiB; the server reads a request in two pieces, and refuses one of 1 MiB."""
    sealed = Sealed({f"client-{number:06d}": bytes(range(250)) for number in range(4096)})
    assert len(packed(sealed)) > 1 << 20
    monkeypatch.setattr(service, "REFUSAL_S", 0.0)
    told: list[str] = []
    one = Service(SimpleNamespace(told=told.append), enrolment=tmp_path)  # type: ignore[arg-type]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=packed(sealed))

    async def in_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0.05)

    async def play() -> tuple[Any, list[str]]:
        app = web.Application()
        app.add_routes([web.post("/answer", answer), web.post("/enrol", one._enrol)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        client = Client(task(), np.empty(0), name="a", url=url, store=None)  # type: ignore[arg-type]
        said = []
        async with aiohttp.ClientSession() as client._session:
            found = await client._ask("POST", "/answer")
            for pieces in ((b'{"token": "x", "name": "new", ', b'"request": "y"}'), (b"x" * (1 << 20),)):
                async with client._session.post(url + "/enrol", data=in_pieces(*pieces)) as response:
                    said.append(await response.text())
        await runner.cleanup()
        return found, said

    found, said = asyncio.run(play())
    assert found == sealed
    assert "the token is" in said[0]
    assert said[1] == "a message has more than 8192 bytes"
    assert len(told) == 2


async def without_certificate(server: Server) -> int:
    """The status of a request for work by somebody who shows no certificate."""
    context = ssl.create_default_context(cafile=str(server.certificates / "authority.pem"))
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector) as session, session.post(server.url + "/work") as response:
        return response.status


def test_an_upload_that_takes_longer_than_the_patience_goes_on_where_it_broke(tmp_path: Path) -> None:
    """As long as something comes through; where nothing does, it is a sentence."""
    one = task_of()
    pieces, there, most = [bytes(range(250)) * 40], bytearray(), 4000

    async def told(request: web.Request) -> web.StreamResponse:
        return web.Response(body=packed(messages.Received(len(there))))

    async def slow(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        await asyncio.sleep(0.3)
        there.extend(body[:most])
        if len(there) == len(pieces[0]):
            return web.Response(body=packed(messages.Ended(True)))
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def scene() -> None:
        nonlocal most
        application = web.Application()
        application.router.add_get("/{rest:.*}", told)
        application.router.add_put("/{rest:.*}", slow)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        data = data_for(one, shards_of(one)[0], seed=0)
        client = Client(one, data, name="a", url=url, store=ClientStore(tmp_path), patience_s=0.2)
        train = messages.Train(Ticket("a", 0, 0), 0, None, None)
        async with aiohttp.ClientSession() as client._session:
            assert await client._sent(train, pieces) == messages.Ended(True)
            assert bytes(there) == pieces[0]
            there.clear()
            most = 0
            with pytest.raises(EnvironmentFault, match="has not answered"):
                await client._sent(train, pieces)
        await runner.cleanup()

    asyncio.run(scene())


def test_a_client_reads_on_where_a_response_broke(tmp_path: Path) -> None:
    """Answers and a model that break off after their headers are asked for again, the model from where it broke; a
    server that is gone for longer than the patience is a sentence."""
    one = task_of()
    header = messages.ModelHeader(parts=(messages.part_of("model", one.model),), version=0)
    frame = messages.frame_head(header) + bytes(messages.bytes_of(one.model))
    answer = packed(messages.Wait(1.5))
    ranges: list[str] = []

    async def broken(request: web.Request) -> web.StreamResponse:
        """Half of the rest, then nothing, of all but the third try."""
        ranges.append(request.headers.get("Range", request.method))
        start = int(ranges[-1].removeprefix("bytes=").rstrip("-")) if "Range" in request.headers else 0
        rest = (frame if request.method == "GET" else answer)[start:]
        response = web.StreamResponse(status=206, headers={"Content-Length": str(len(rest))})
        await response.prepare(request)
        whole = len(ranges) % 3 == 0
        await response.write(rest if whole else rest[: len(rest) // 2])
        if not whole:
            assert request.transport is not None
            request.transport.close()
        return response

    async def scene() -> None:
        application = web.Application()
        application.router.add_route("*", "/{rest:.*}", broken)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        data = data_for(one, shards_of(one)[0], seed=0)
        client = Client(one, data, name="a", url=url, store=ClientStore(tmp_path), patience_s=HANG_S)
        async with aiohttp.ClientSession() as client._session:
            assert await client._ask("POST", "/work") == messages.Wait(1.5)
            model = await client._model(0)
            assert model is not None
            assert torch.equal(model.vectors["model"], one.model)
            await runner.cleanup()
            client._patience_s = 0.5
            with pytest.raises(EnvironmentFault, match=r"has not answered for 0\.5 s"):
                await client._ask("POST", "/work")

    asyncio.run(scene())
    assert ranges == ["POST"] * 3 + ["bytes=0-", f"bytes={len(frame) // 2}-", ranges[5]]
    assert int(ranges[5][6:-1]) > len(frame) // 2
