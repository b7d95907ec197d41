"""A rehearsed run on two hosts that a relay joins: what is started on each of them.

A run without `[elastic]` is started by `shoal launch`, half of the ranks on each host. An elastic one has a coordinator
on the first host, and `shoal train` on both with half of the replicas.

The coordinator is a process of its own, which can be killed and comes back.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.experiments.rehearsal.faults import ADDRESSES, INTERFACE, Relay, RelayHost, why_no_relay
from shoal.launcher.children import THROWN_AWAY_S, stop
from shoal.launcher.environment import LOOPBACK
from shoal.resilience.config import ElasticConfig

MASTER_PORT, COORDINATOR_PORT = 29500, 29400
CERTIFICATE_S = 30.0


@dataclass(frozen=True)
class Started:
    """A command, and its environment."""

    command: list[str]
    environ: Mapping[str, str]


def why_not_two_hosts(ranks: int, *, elastic: ElasticConfig | None) -> str | None:
    """Why a run of so many ranks cannot be rehearsed on two hosts, as a sentence; None where it can."""
    if (reason := why_no_relay()) is not None:
        return reason
    if elastic is not None and elastic.max < 2:
        return "one replica is on one host: raise elastic.max"
    if elastic is not None and shutil.which("openssl") is None:
        return "the coordinator of two hosts needs a certificate, and there is no openssl: apt-get install openssl"
    if elastic is None and ranks % 2:
        return f"{ranks} ranks do not divide into two hosts: rehearse an even number"
    return None


@contextmanager
def on_two_hosts(
    joined: Relay,
    train: Sequence[str],
    *,
    ranks: int,
    elastic: ElasticConfig | None,
    folder: Path,
    environ: Mapping[str, str],
) -> Iterator[list[Started]]:
    """What to start on each host, so that together they do `train` (the arguments of Python). `folder` is this run's.

    A coordinator runs until the end of the block. Raises `EnvironmentFault` where it does not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if elastic is None:
        yield [
            Started(
                [*host.enter, sys.executable, "-m", "shoal", "launch", "--ranks-per-node", str(ranks // 2),
                 "--directory", str(folder / "launch"), *train],
                _environ(environ, number) | {
                    "PET_NNODES": "2", "PET_NODE_RANK": str(number),
                    "PET_MASTER_ADDR": ADDRESSES[0], "PET_MASTER_PORT": str(MASTER_PORT),
                },
            )
            for number, host in enumerate(joined.hosts)
        ]  # fmt: skip
        return
    here = (elastic.max + 1) // 2, elastic.max // 2
    with _coordinator(joined.hosts[0], elastic, folder, environ):
        options = ["--coordinator", f"{ADDRESSES[0]}:{COORDINATOR_PORT}", "--token", str(folder / "token"),
                   "--authorities", str(folder / "certificate.pem")]  # fmt: skip
        yield [
            Started(
                [*host.enter, sys.executable, *train, *options, "--replicas", str(here[number])],
                _environ(environ, number),
            )
            for number, host in enumerate(joined.hosts)
        ]


def _environ(environ: Mapping[str, str], number: int) -> dict[str, str]:
    return {**environ, "SHOAL_HOST": f"host-{number}", "GLOO_SOCKET_IFNAME": INTERFACE}


@contextmanager
def _coordinator(host: RelayHost, elastic: ElasticConfig, folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    _make_certificate(host.address, folder)
    secured = ["--certificate", str(folder / "certificate.pem"), "--key", str(folder / "key.pem")]
    command = [*host.enter, *serving(elastic, folder, host.address, COORDINATOR_PORT), *secured]
    process = started_coordinator(command, environ)[0]
    try:
        yield
    finally:
        end_coordinator(process)


def serving(elastic: ElasticConfig, folder: Path, address: str, port: int) -> list[str]:
    """The command of a coordinator for a run of `elastic`, with its journal and its token in `folder`."""
    return [
        sys.executable, "-m", "shoal", "coordinator", "serve", str(folder / "journal"),
        "--token", str(folder / "token"), "--min", str(elastic.min), "--max", str(elastic.max),
        "--address", address, "--port", str(port), "--silence", str(elastic.silence_s),
        "--accept", str(elastic.accept_s), "--hang", str(elastic.hang_s), "--json",
    ]  # fmt: skip


def started_coordinator(command: Sequence[str], environ: Mapping[str, str]) -> tuple[subprocess.Popen[str], int]:
    """The process of a coordinator that listens, and its port. Raises `EnvironmentFault` where it does not come up."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    try:
        return process, int(json.loads(first)["port"])
    except json.JSONDecodeError as error:
        said = (first + process.stdout.read()).strip()
        end_coordinator(process)
        raise EnvironmentFault(f"the coordinator of the rehearsal did not come up: {said}") from error
    except BaseException:
        end_coordinator(process)
        raise


def end_coordinator(process: subprocess.Popen[str]) -> None:
    """Ends it, if it runs."""
    stop([process], patience_s=THROWN_AWAY_S)
    if process.stdout is not None:
        process.stdout.close()


def _make_certificate(address: str, folder: Path) -> None:
    """A certificate that signs itself, for one day. Raises `EnvironmentFault`."""
    made = subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "1", "-subj", f"/CN={address}", "-addext", f"subjectAltName=IP:{address}",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem"),
        ],
        capture_output=True,
        text=True,
        timeout=CERTIFICATE_S,
        check=False,
    )  # fmt: skip
    if made.returncode != 0:
        raise EnvironmentFault(f"openssl made no certificate for the rehearsal: {made.stderr.strip()[-300:]}")


class CoordinatorProcess:
    """Serves on loopback from its creation on. As a context manager it ends with the block."""

    def __init__(self, elastic: ElasticConfig, folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._elastic, self._folder, self._environ = elastic, folder, environ
        self._process, self._port = started_coordinator(serving(elastic, folder, LOOPBACK, 0), environ)

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        end_coordinator(self._process)

    def command(self, train: Sequence[str]) -> Started:
        """`train` (the arguments of Python) with all replicas on this host."""
        options = ["--coordinator", f"{LOOPBACK}:{self._port}", "--token", str(self._folder / "token")]
        replicas = ["--replicas", str(self._elastic.max)]
        return Started([sys.executable, *train, *options, *replicas], self._environ)

    def kill(self) -> None:
        """kill -9: nobody is told, and the journal is what it is."""
        self._process.kill()
        self._process.wait()

    def come_back(self) -> None:
        """On the same port, with the same journal."""
        if self._process.poll() is not None:
            end_coordinator(self._process)
            command = serving(self._elastic, self._folder, LOOPBACK, self._port)
            self._process, _ = started_coordinator(command, self._environ)
