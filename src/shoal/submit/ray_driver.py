"""The driver of a job on Ray: reserves all hosts or none, starts an actor on each, and starts the job again.

    python -m shoal.submit.ray_driver RUN_DIR/submit/ray-job.json

An actor runs `shoal launch`, as a task of srun would; the ranks know nothing of Ray. When an actor or its host is
lost, that is said by name, the other actors end, and all start again from the newest checkpoint. So they do when a
host has failed and others go on, which may be waiting for it at the start. How the job stands lies in
`ray-status.json` beside its description. The driver leaves with the job's exit code, and with 75 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from shoal.errors import CollectiveError, EnvironmentFault, MissingExtra, ShoalError, Stopped, UsageError
from shoal.files import read_file
from shoal.launcher.host import MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK, NPROC_PER_NODE
from shoal.launcher.orphans import ask_kernel
from shoal.submit.job import FATAL_CODES
from shoal.submit.ray_job import RayJob
from shoal.submit.scheduler import State
from shoal.units import plural

# The actor of a host: runs the host's launcher as a process, which ends with the actor.


class RayHost:
    """One host of a job. Ray makes an actor of it; it imports no Ray itself but to ask for its own address."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_point(self) -> tuple[str, int]:
        """This host's address in the cluster, and a port that was free just now."""
        from ray.util import get_node_ip_address

        with socket.socket() as listener:
            listener.bind(("", 0))
            return str(get_node_ip_address()), listener.getsockname()[1]

    def run(self, command: Sequence[str], variables: dict[str, str], folder: str) -> int:
        """Run the launcher to its end; its exit code, 128 + n for signal n. Without a `folder` it starts in the actor's
        own, which is the job's working directory.
        """
        # The kernel ends the launcher with this thread, and the launcher's guards end its ranks.
        self._process = subprocess.Popen(
            command, cwd=folder or None, env={**os.environ, **variables}, preexec_fn=ask_kernel, start_new_session=True
        )
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self, within_s: float) -> None:
        """SIGTERM to the launcher, which passes it on to its ranks; returns when they have saved and left."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()


STATUS = "ray-status.json"
_MOST_BYTES = 1 << 20
_LOOK_S = 0.5
_KNOCK_S = 10.0
_MOST_NAMED = 8
_REPORT_S = 10.0
"""How long hosts go on after another has failed: those that trained with it report their own errors in that time."""


class DriverStatus(msgspec.Struct, frozen=True):
    """How the job stands, as the driver last wrote it."""

    state: State
    sentence: str
    pid: int


def import_ray() -> Any:
    """The package. Raises `MissingExtra`."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingExtra("ray", extra="ray", purpose="a job on Ray") from None


def drive(job: RayJob, status: Path) -> int:
    """Run the job to its end; its exit code. Raises `EnvironmentFault` where the cluster cannot hold it."""
    ray = import_ray()
    connect(ray, job.address)
    for number in (signal.SIGTERM, signal.SIGINT):  # after `ray.init`, which sets a handler of its own
        signal.signal(number, _note_asked)
    _say(status, "waiting", f"{job.name} waits for {_wanted(job)}; no rank has started")
    with _reserved(ray, job) as group:
        starts = 0
        while True:
            again = f", started again {plural(starts, 'time')}" if starts else ""
            _say(status, "running", f"{job.name} runs on {plural(job.hosts, 'host')}{again}")
            code, sentence = _start(ray, job, group)
            if code == 0 or code in FATAL_CODES or starts == job.restarts:
                _say(status, "done" if code == 0 else "failed", f"{job.name}: {sentence}{again}")
                return code
            _say(status, "waiting", f"{job.name}: {sentence}; starts again from its newest checkpoint")
            starts += 1


def exit_code(codes: Sequence[int]) -> int:
    """The code of a start, from those of its hosts: a host that only lost another (3) is the cause last."""
    failed = [code for code in codes if code != 0]
    own = [code for code in failed if code not in (CollectiveError.exit_code, Stopped.exit_code)]
    return next(iter([*own, *sorted(failed, reverse=True)]), 0)


def connect(ray: Any, address: str) -> None:
    """To the cluster at an address ("auto": the one of this host). Raises `EnvironmentFault` where none answers."""
    _knock(address)
    try:
        ray.init(address=address, namespace="shoal", log_to_driver=True, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, str(error).strip().partition("\n")[0]) from None


def _knock(address: str) -> None:
    """At an address where nothing listens, Ray itself tries for a minute and a half. Raises `EnvironmentFault`."""
    host, _, port = address.rpartition(":")
    if host.startswith("ray://") or not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, found: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"no Ray cluster answers at {address!r} ({found}): start one (ray start --head), or give the address of its "
        "head with --address"
    )


@contextlib.contextmanager
def _reserved(ray: Any, job: RayJob) -> Any:
    groups = importlib.import_module("ray.util.placement_group")
    group = groups.placement_group([dict(job.bundle)] * job.hosts, strategy=job.strategy)
    try:
        ready, _ = ray.wait([group.ready()], timeout=job.wait_s)
        if not ready:
            there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            listed = "; ".join(_amounts({name: node.get(name, 0.0) for name in job.bundle}) for node in there)
            raise EnvironmentFault(
                f"the cluster had no room within {job.wait_s:g} s for {_wanted(job)}: no rank was started; it has "
                f"{len(there)} hosts ({listed}), some of it perhaps in use; ask for less, wait longer (--wait), or let "
                "shoal plan find a layout that fits"
            )
        yield group
    finally:
        groups.remove_placement_group(group)


def _start(ray: Any, job: RayJob, group: Any) -> tuple[int, str]:
    """One start of all hosts: its exit code, and how it ended."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    actor = ray.remote(RayHost)
    amounts = {"num_cpus": job.bundle["CPU"], "num_gpus": job.bundle.get("GPU", 0)}
    hosts = [
        actor.options(
            **amounts,
            max_concurrency=2,  # `stop` has to get through while `run` waits
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(job.hosts)
    ]
    try:
        return _until_over(ray, job, hosts)
    except BaseException:
        _stop(ray, job, hosts)
        raise
    finally:
        for host in hosts:
            ray.kill(host)


def _until_over(ray: Any, job: RayJob, hosts: list[Any]) -> tuple[int, str]:
    lost = ray.exceptions.RayActorError
    try:
        address, port = ray.get(hosts[0].meeting_point.remote())
    except lost as error:
        return CollectiveError.exit_code, _named_loss(job, 0, error)
    running = {
        host.run.remote(job.command, _variables(job, index, address, port), job.folder): index
        for index, host in enumerate(hosts)
    }
    codes: list[int] = []
    failed, deadline_s = "", math.inf
    while running and time.monotonic() < deadline_s:
        # Ray swallows what a handler raises inside its calls: the handler makes a note, and this loop looks at it.
        ready, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_S)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            raise _Asked
        if not ready:
            continue
        (ended,) = ready
        index = running.pop(ended)
        try:
            codes.append(ray.get(ended))
        except lost as error:
            _stop(ray, job, [host for other, host in enumerate(hosts) if other != index])
            return CollectiveError.exit_code, _named_loss(job, index, error)
        if codes[-1] != 0:
            failed = failed or f"host {index} of {job.hosts} ended with exit code {codes[-1]}"
            patience_s = job.save_s if codes[-1] == Stopped.exit_code else _REPORT_S
            deadline_s = min(deadline_s, time.monotonic() + patience_s)
    code = exit_code(codes)
    if running:  # they may wait at the start for the host that failed, and cannot know
        told = sorted(running.values())
        _stop(ray, job, [hosts[index] for index in told])
        return code, f"{failed}; {_named(told)} went on, and {'was' if len(told) == 1 else 'were'} told to end"
    return code, "is done" if code == 0 else f"its hosts ended with exit codes {', '.join(map(str, codes))}"


def _stop(ray: Any, job: RayJob, hosts: list[Any]) -> None:
    """SIGTERM to the ranks of these hosts, and time to save."""
    asked = [host.stop.remote(job.save_s) for host in hosts]
    ray.wait(asked, num_returns=len(asked), timeout=job.save_s)


def _variables(job: RayJob, index: int, address: str, port: int) -> dict[str, str]:
    place = {
        NNODES: str(job.hosts),
        NODE_RANK: str(index),
        NPROC_PER_NODE: str(job.ranks_per_node),
        MASTER_ADDR: address,
        MASTER_PORT: str(port),
    }
    secrets = {name: os.environ[name] for name in job.secrets if name in os.environ}
    return {**secrets, **job.variables, **place}


def _named_loss(job: RayJob, index: int, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"host {index} of {job.hosts} was lost ({reason})"


def _named(hosts: Sequence[int]) -> str:
    listed = ", ".join(map(str, hosts[:_MOST_NAMED])) + (", ..." if len(hosts) > _MOST_NAMED else "")
    return f"host{'' if len(hosts) == 1 else 's'} {listed}"


def _wanted(job: RayJob) -> str:
    apart = " on different hosts" if job.strategy == "STRICT_SPREAD" else ""
    return f"{job.hosts} bundles of {_amounts(job.bundle)}{apart}"


def _amounts(bundle: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _say(status: Path, state: State, sentence: str) -> None:
    print(f"shoal: {sentence}", flush=True)
    partial = status.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(DriverStatus(state, sentence, os.getpid())))
    partial.replace(status)


class _Asked(BaseException):
    """SIGTERM or SIGINT to the driver."""


def _note_asked(number: int, frame: FrameType | None) -> None:
    """The note is that both signals are ignored from now on: a second request changes nothing."""
    for both in (signal.SIGTERM, signal.SIGINT):
        signal.signal(both, signal.SIG_IGN)


def main(path: Path) -> int:
    """Run the job that `path` describes; the exit code."""
    content = read_file(path, limit_bytes=_MOST_BYTES, error=UsageError, repair="give ray-job.json of a submitted run")
    status = path.absolute().with_name(STATUS)  # Ray changes the folder of a process that it gives a working directory
    try:
        return drive(msgspec.json.decode(content, type=RayJob), status)
    except _Asked:
        _say(status, "failed", "cancelled; ranks that trained have saved")
        return Stopped.exit_code
    except ShoalError as error:
        _say(status, "failed", str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
