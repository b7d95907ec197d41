"""A Slurm cluster of several hosts on this one: Debian's munge, slurmctld, and a slurmd for each host name.

    python -m tests.services.slurm install            apt-get, as root
    python -m tests.services.slurm run FOLDER         until Ctrl-C; prints the SLURM_CONF to set

    with slurm_cluster(folder, hosts=3) as cluster:
        cluster.call("sinfo")

Nothing of the host's own Slurm or munge is touched: configuration, key, sockets and state lie in the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports
from tests.waiting import HANG_S

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
_CONF = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=6
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    missing = [program for program in PROGRAMS if _program(program) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): python -m tests.services.slurm install"
    if os.getuid() != 0:
        return "slurmd starts the jobs of all users, so it has to be started as root"
    return None


def install() -> None:
    """Debian's packages; their own services stay stopped."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES], check=True, env=environ)


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster. `environ` is what its clients need."""

    folder: Path
    hosts: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]]

    @property
    def environ(self) -> dict[str, str]:
        """Where clients find the cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """What a client prints. Raises `AssertionError` where it fails."""
        done = subprocess.run(
            command, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def without(self, host: str) -> Iterator[None]:
        """A host whose slurmd is dead, and which the controller knows to be down; back at the end of the block."""
        _end(self.daemons.pop(host))
        self.call("scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=lost")
        try:
            yield
        finally:
            # It registers by itself (ReturnToService).
            self.daemons[host] = _start(["slurmd", "-D", "-N", host], {**os.environ, **self.environ})
            idle = ("sinfo", "-h", "-n", host, "-o", "%T")
            wait_until(lambda: self.call(*idle).strip() == "idle", f"{host} to be back", self.log)

    def log(self) -> str:
        """The end of the controller's log."""
        return (self.folder / "slurmctld.log").read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def slurm_cluster(folder: Path, *, hosts: int = 3, cores: int = 4) -> Iterator[SlurmCluster]:
    """Hosts `n1`, `n2`, ... of `cores` cores in a partition `main`; ended with all their jobs."""
    names = tuple(f"n{index + 1}" for index in range(hosts))
    controller_port, *ports = free_ports(1 + hosts)
    this = socket.gethostname().partition(".")[0]
    lines = [
        f"NodeName={name} NodeHostname={this} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=2000"
        for name, port in zip(names, ports, strict=True)
    ]
    conf = _CONF.format(host=this, folder=folder, controller_port=controller_port)
    lines.append(f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join([conf, *lines, ""]))
    (folder / "state").mkdir(exist_ok=True)
    cluster = SlurmCluster(folder, names, {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_munged(folder))
        environ = {**os.environ, **cluster.environ}
        stack.enter_context(_daemon(["slurmctld", "-D"], environ))
        stack.callback(lambda: [_end(daemon) for daemon in cluster.daemons.values()])
        for name in names:
            cluster.daemons[name] = _start(["slurmd", "-D", "-N", name], environ)
        idle = f"{hosts} idle"
        wait_until(lambda: cluster.call("sinfo", "-h", "-o", "%D %T").strip() == idle, "idle hosts", cluster.log)
        try:
            yield cluster
        finally:
            with contextlib.suppress(AssertionError):
                cluster.call("scancel", "--signal=KILL", "--full", "--user=root")
                cluster.call("scancel", "--user=root")
                wait_until(lambda: not cluster.call("squeue", "-h").strip(), "the end of all jobs", cluster.log)


def wait_until(condition: Callable[[], bool], what: str, log: Callable[[], str], *, within_s: float = HANG_S) -> None:
    """Look again and again until the condition holds. Raises `AssertionError` with the log where it does not."""
    end_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(AssertionError):  # a client that does not reach its daemon yet
            if condition():
                return
        assert time.monotonic() < end_s, f"waited {within_s:.0f} s in vain for {what}:\n{log()}"
        time.sleep(0.1)


@contextlib.contextmanager
def _munged(folder: Path) -> Iterator[None]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    names = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
    options = [f"--{option}={folder / name}" for option, name in {**names, "seed-file": "munge.seed"}.items()]
    with _daemon(["munged", "--foreground", "--force", *options], dict(os.environ)):
        wait_until((folder / "munge.sock").exists, "munged", lambda: "")
        yield


@contextlib.contextmanager
def _daemon(command: list[str], environ: dict[str, str]) -> Iterator[None]:
    process = _start(command, environ)
    try:
        yield
    finally:
        _end(process)


def _start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    program = _program(command[0])
    assert program is not None
    return subprocess.Popen([program, *command[1:]], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _program(name: str) -> str | None:
    """Debian keeps daemons where plain users' PATH does not look."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


if __name__ == "__main__":
    if sys.argv[1] == "install":
        install()
    else:
        place = Path(sys.argv[2])
        place.mkdir(parents=True, exist_ok=True)
        with slurm_cluster(place.resolve()) as running, contextlib.suppress(KeyboardInterrupt):
            print(f"export SLURM_CONF={running.environ['SLURM_CONF']}", flush=True)
            while True:
                time.sleep(3600)
