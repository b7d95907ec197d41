"""The coordinator as a process: its own death, and that of replicas."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.coordinator.client import Address, Client, Connection, NoGeneration
from shoal.coordinator.journal import Journal
from shoal.coordinator.service import RunningClock, coordinator_in
from shoal.coordinator.watch import watching
from shoal.errors import EnvironmentFault
from shoal.launcher import frames, handshake
from shoal.launcher.handshake import Refusal, TokenRefused, hello
from shoal.resilience.events import Admitted, Committed, Decision, Ended, Formed, Join, Look, View
from shoal.resilience.ledger import audit
from shoal.resilience.membership import Rules
from shoal.resilience.participant import FencedOut
from tests.coordinator.services import first_generation, running, start, together
from tests.waiting import HANG_S, wait_until

FRAME = {"most_bytes": 1 << 20, "begin_s": None, "rest_s": None}


def committed(service_address: object, step: int) -> View:
    """The view when `step` is committed."""
    connection = Connection(service_address)  # pyright: ignore[reportArgumentType]
    views: list[View] = []

    def look() -> bool:
        view = connection.ask(Look())
        assert isinstance(view, View)
        views.append(view)
        return view.committed >= step

    wait_until(look, lambda: str(views[-1]))
    connection.close()
    return views[-1]


def test_steps_are_committed_through_a_kill_of_the_coordinator(tmp_path: Path) -> None:
    """kill -9 of the coordinator and a new one on the same journal and port: the same generation goes on, steps that
    were taken meanwhile are committed, each sample once."""
    service = start(tmp_path, "--min", "2", "--max", "2")
    try:
        with Client(service.address, "a") as a, Client(service.address, "b") as b:
            first_generation(a, b)
            for step in (1, 2):
                a.applied(stop=8 * step)
                b.applied(stop=8 * step)
            committed(service.address, 2)
            service.process.kill()
            service.process.wait()
            a.applied(stop=24)
            b.applied(stop=24)
            assert not a.ending
            service = start(tmp_path, "--min", "2", "--max", "2", port=service.port)
            view = committed(service.address, 3)
            assert (view.generation, {*view.members}) == (1, {"a", "b"})
            assert not a.ending
    finally:
        service.process.kill()
        service.process.wait()
    journal = Journal(tmp_path / "journal")
    ledger = audit(journal.read())
    journal.close()
    assert (ledger.step, ledger.position, ledger.redone) == (3, 24, 0)


@pytest.mark.slow
def test_a_coordinator_that_stood_still_fences_nobody(tmp_path: Path) -> None:
    """A machine that stands still for three times the silence after which a rank is lost, and whose coordinator runs
    again before the ranks do: these are threads of this process."""
    with (
        running(tmp_path, "--min", "2", "--max", "2", "--silence", "1") as service,
        Client(service.address, "a") as a,
        Client(service.address, "b") as b,
    ):
        first_generation(a, b)
        for client in (a, b):
            client.applied(stop=8)
        committed(service.address, 1)
        both, first = f"{service.process.pid} {os.getpid()}", f"kill -CONT {service.process.pid}"
        subprocess.run(["sh", "-c", f"(sleep 3; {first}; sleep 0.4; kill -CONT {os.getpid()}) & kill -STOP {both}"])
        for client in (a, b):
            client.applied(stop=16)
        view = committed(service.address, 2)
        assert (view.generation, view.fenced) == (1, {})


def test_time_in_which_nobody_looked_at_the_clock_is_left_out() -> None:
    seconds = iter([0.0, 0.9, 1.9, 7.9, 8.9, 9.9])
    clock = RunningClock(lambda: next(seconds), period_s=1.0)
    assert [round(clock(), 6) for _ in range(5)] == [0.9, 1.9, 2.9, 3.9, 4.9]


def test_survivors_are_woken_and_form_the_next_generation(tmp_path: Path) -> None:
    """The launcher's word that a replica ended reaches the others in their own threads; the one with the newest step
    holds the state, and the other copies it."""
    with running(tmp_path, "--min", "2", "--max", "3") as service:
        woken = threading.Event()
        with Client(service.address, "a", on_ending=woken.set) as a, Client(service.address, "b") as b:
            with Client(service.address, "c") as c:
                first_generation(a, b, c)
                for client in (a, b, c):
                    client.applied(stop=8)
                committed(service.address, 1)
                a.applied(stop=16)
            connection = Connection(service.address)
            connection.ask(Ended("c"))
            connection.close()
            assert woken.wait(HANG_S)
            begin, copied = together(a, b)
            assert (begin.state_from, begin.view.step, begin.view.position) == ("here", 2, 16)
            assert copied.state_from == "peer"
            b.ready(step=2, position=16)
            for client in (a, b):
                client.applied(stop=24)
            assert {*committed(service.address, 3).members} == {"a", "b"}


def test_who_waits_for_a_generation_hears_of_it_before_the_next_heartbeat(tmp_path: Path) -> None:
    """The first of two that lose a third accepts, and is told when the second has done so, though its next heartbeat is
    far away."""
    seldom = 2 * HANG_S
    with running(tmp_path, "--min", "2", "--max", "3", "--silence", str(2 * seldom)) as service:  # noqa: SIM117
        with Client(service.address, "a", heartbeat_s=seldom) as a, Client(service.address, "b") as b:
            with Client(service.address, "c") as c:
                wait_until(lambda: all(client._part.admitted for client in (a, b, c)))
                a.failed()  # wakes it: it has joined before the others
                first_generation(a, b, c)
            connection = Connection(service.address)
            connection.ask(Ended("c"))
            connection.close()
            with ThreadPoolExecutor(1) as pool:
                a.failed()
                waiting = pool.submit(a.generation, HANG_S)
                wait_until(lambda: a._part.promised == 2)
                time.sleep(0.1)  # a has said that it accepts, and that was not enough
                b.failed()
                assert b.generation(HANG_S).view.members == waiting.result(HANG_S).view.members


def test_a_spare_joins_without_a_restart(tmp_path: Path) -> None:
    """One replica trains; a second comes, and both go on from the first one's state."""
    with running(tmp_path, "--min", "1", "--max", "2", "--start", "0") as service:  # noqa: SIM117
        with Client(service.address, "a") as a:
            first_generation(a)
            a.applied(stop=8)
            committed(service.address, 1)
            with Client(service.address, "b") as b:
                mine, joined = together(a, b)
                assert (mine.state_from, joined.state_from, joined.view.holders) == ("here", "peer", ("a",))
                b.ready(step=1, position=8)
                for client in (a, b):
                    client.applied(stop=16)
                assert committed(service.address, 2).members == ("a", "b")


def test_a_spare_does_not_wait_for_ever_for_a_coordinator_that_is_gone(tmp_path: Path) -> None:
    """It stands by while the coordinator says that others train; killed for good, it says so no more."""
    with running(tmp_path, "--min", "1", "--max", "1", "--start", "0") as service, Client(service.address, "a") as a:
        first_generation(a)  # before there is a spare: whoever joins first is the one that trains
        with Client(service.address, "spare") as spare, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(spare.generation, 1.0)
            wait_until(lambda: spare._part.stands_by)
            service.process.kill()
            with pytest.raises(NoGeneration, match="replica spare waited 1 s for a generation"):
                waiting.result(HANG_S)
        a.applied(stop=8)
        assert not a.ending, "who trains goes on"


def test_an_expelled_replica_is_told(tmp_path: Path) -> None:
    """`shoal coordinator expel` fences it; its next step is refused with the reason."""
    with running(tmp_path, "--min", "1", "--max", "2") as service:  # noqa: SIM117
        with Client(service.address, "a") as a, Client(service.address, "b") as b:
            first_generation(a, b)
            where = ["coordinator", "expel", f"127.0.0.1:{service.port}", "b", "--token", str(tmp_path / "token")]
            subprocess.run([sys.executable, "-m", "shoal", *where], check=True)
            with pytest.raises(FencedOut, match="an operator expelled it"):
                b.generation(HANG_S)


def test_a_launcher_that_watches_anew_hears_no_old_news(tmp_path: Path) -> None:
    """It knows the generation and its steps from the view that it begins with; then it hears what is new."""
    with running(tmp_path, "--min", "1", "--max", "2", "--start", "0") as service:  # noqa: SIM117
        with Client(service.address, "a") as a:
            first_generation(a)
            a.applied(stop=8)
            since = committed(service.address, 1)
            news: queue.SimpleQueue[object] = queue.SimpleQueue()
            with watching(service.address, lambda: ("a", "b"), since=since, told=news.put, silence_s=60):  # noqa: SIM117
                with Client(service.address, "b") as b:
                    together(a, b)
                    b.ready(step=1, position=8)
                    formed = news.get(timeout=HANG_S)
                    assert isinstance(formed, Formed)
                    assert (formed.members, formed.step) == (("a", "b"), 1)
                    for client in (a, b):
                        client.applied(stop=16)
                    step = news.get(timeout=HANG_S)  # the one that it began with is none of its own
                    assert isinstance(step, Committed)
                    assert step.step == 2


def test_a_connection_that_breaks_is_no_refusal() -> None:
    """A coordinator that dies in the handshake resets it, and a client tries again; a refusal it believes at once."""
    tried: list[bool] = []

    def refuse(listener: socket.socket) -> None:
        for answer in (b"", b"", b"", frames.encode(Refusal())):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(frames.encode(hello()))
                tried.append(bool(connection.recv(1 << 10)))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(HANG_S)
        refused = pool.submit(refuse, listener)
        address = Address("127.0.0.1", listener.getsockname()[1], b"x" * 64)
        with Client(address, "a") as client, pytest.raises(TokenRefused):
            client.generation(HANG_S)
        refused.result(HANG_S)
    assert tried == [True] * 4


@pytest.mark.slow
def test_a_second_coordinator_on_one_journal_is_refused(tmp_path: Path) -> None:
    """One journal, one coordinator: the second ends with exit code 3 and says why."""
    with running(tmp_path):
        command = [sys.executable, "-m", "shoal", "coordinator", "serve", str(tmp_path / "journal")]
        done = subprocess.run(
            [*command, "--token", str(tmp_path / "token")], capture_output=True, text=True, check=False, timeout=180
        )
        assert done.returncode == 3
        assert "is open in another process" in done.stderr


def test_without_tls_only_loopback_is_served(tmp_path: Path) -> None:
    """An address that others reach needs a certificate."""
    command = [sys.executable, "-m", "shoal", "coordinator", "serve", str(tmp_path / "journal")]
    done = subprocess.run(
        [*command, "--token", str(tmp_path / "token"), "--address", "0.0.0.0"],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 2
    assert "give --certificate and --key" in done.stderr


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    """And left as it is."""
    (tmp_path / "journal").write_text("not a database, but somebody's notes\n" * 40)
    command = [sys.executable, "-m", "shoal", "coordinator", "serve", str(tmp_path / "journal")]
    done = subprocess.run(
        [*command, "--token", str(tmp_path / "token")], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 3
    assert "cannot be used" in done.stderr
    assert (tmp_path / "journal").read_text().startswith("not a database")


def test_the_view_is_one_json_object(tmp_path: Path) -> None:
    """`shoal coordinator view --json`."""
    with running(tmp_path) as service:
        command = [sys.executable, "-m", "shoal", "coordinator", "view", f"127.0.0.1:{service.port}"]
        done = subprocess.run(
            [*command, "--token", str(tmp_path / "token"), "--json"], capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout)["generation"] == 0


def test_no_coordinator_is_a_sentence(tmp_path: Path) -> None:
    """A client whose coordinator never answers says so, and does not hang."""
    with running(tmp_path) as service:
        address = service.address
    with Client(address, "a") as client, pytest.raises(NoGeneration, match="does not answer: start it"):
        client.generation(0.5)


def test_who_is_told_to_leave_takes_no_lock() -> None:
    """A signal's handler may come while the thread that it interrupts holds any of them."""
    client = Client(Address("127.0.0.1", 1, b"token"), "a")
    with client._wake._cond, client._changed:  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(target=client.leave, daemon=True)
        thread.start()
        thread.join(1)
        assert not thread.is_alive()


@pytest.mark.parametrize("where", ["journal", "listener"])
def test_a_fault_that_nobody_foresaw_ends_the_service(tmp_path: Path, where: str) -> None:
    """Who waits for an answer is not left to wait."""

    class Faulty(Journal):
        def append(self, decisions: Iterable[Decision]) -> None:
            if where == "journal":
                raise TypeError("a defect")
            super().append(decisions)

    def hear(news: object) -> None:
        if isinstance(news, Exception):
            told.append(news)
        else:
            raise TypeError("a defect")

    async def join(address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        greeting = frames.decode(await frames.read(reader, **FRAME), handshake.HELLOS)
        writer.write(frames.encode(handshake.prove(address.token, greeting)))
        await frames.read(reader, **FRAME)
        writer.write(frames.encode(Join("replica", 1)))
        with pytest.raises((ConnectionError, EOFError, EnvironmentFault)):
            await asyncio.wait_for(frames.read(reader, **FRAME), HANG_S)

    told: list[Exception] = []
    with coordinator_in(tmp_path, Rules(1, 2), told=hear, journal=Faulty) as address:
        asyncio.run(join(address))
    assert [str(error) for error in told] == ["a defect"]


def test_what_comes_in_together_is_written_together(tmp_path: Path) -> None:
    """Replicas that join at once cost few writes; nobody has an answer before what it tells of is in the journal."""
    writes: list[list[Decision]] = []
    asked = threading.Event()

    class Counted(Journal):
        def append(self, decisions: Iterable[Decision]) -> None:
            assert asked.wait(HANG_S)  # a first write that takes until all have asked
            made = list(decisions)
            super().append(made)
            writes.append(made)

    async def all_join(address: Address, count: int) -> list[bool]:
        async def join(number: int) -> bool:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            greeting = frames.decode(await frames.read(reader, **FRAME), handshake.HELLOS)
            writer.write(frames.encode(handshake.prove(address.token, greeting)))
            await frames.read(reader, **FRAME)
            ready.append(number)
            while len(ready) < count:
                await asyncio.sleep(0.01)
            writer.write(frames.encode(Join(f"replica-{number}", 1)))
            joined.append(number)
            if len(joined) == count:
                asked.set()
            await frames.read(reader, **FRAME)
            writer.close()
            return Admitted(f"replica-{number}", 1) in [decision for made in writes for decision in made]

        ready: list[int] = []
        joined: list[int] = []
        return await asyncio.gather(*(join(number) for number in range(count)))

    with coordinator_in(tmp_path, Rules(1, 200), told=lambda _: None, journal=Counted) as address:
        assert all(asyncio.run(all_join(address, 200)))
    assert sum(map(len, writes)) == 200 + 1  # the first of them brings about a proposal
    assert len(writes) < 100
