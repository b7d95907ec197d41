"""The batch script of a job for Slurm: one `srun` task a host, which starts the host's ranks.

    the ranks leave with 75   the script asks for its own requeue; the job resumes from its checkpoint
    before the time limit     `--signal` sends SIGTERM to the ranks, which save and leave with 75
    a host is lost            Slurm itself requeues the job (`--requeue`)
    any other code            the job ends with it

A sweep is one array: each task trains a trial on one host, and is queued again by itself.

Slurm starts a job when all of its hosts are free, so all ranks start or none. A task a host, not a task a rank: every
rank then sees all GPUs of its host, as under torchrun, and the host's launcher names the rank that failed first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import Stopped, UsageError
from shoal.submit.job import SubmittedJob

SCRIPT, RUN_FILE = "job.sbatch", "run.toml"
_LOG, _TASK_LOG = "slurm-%j.log", "slurm-%A_%a.log"


@dataclass(frozen=True)
class SlurmOptions:
    """Where in the cluster the job goes; None: the cluster's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None


def batch_script(job: SubmittedJob, options: SlurmOptions) -> str:
    """The text for `sbatch`. Raises `UsageError` for a path that its header cannot hold."""
    header = "\n".join(f"#SBATCH --{name}={value}" for name, value in _header(job, options).items())
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(job.variables.items()))
    command = _command(job)
    return f"""#!/bin/bash
{header}
#SBATCH --requeue

{exports}# All hosts save before any is ended: no --kill-on-bad-exit, and --wait bounds how long the last one may take.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={max(job.resources.save_s, 60)} {command}
code=$?
if [ "$code" -eq {Stopped.exit_code} ]; then
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then
        echo "shoal: stopped after a good checkpoint; job $SLURM_JOB_ID goes back into the queue"
        # Slurm ends this script when it has queued the job again.
        scontrol requeue "$SLURM_JOB_ID" && sleep 60
    else
        echo "shoal: stopped after a good checkpoint, but started again {job.restarts} times already (--restarts)"
    fi
fi
exit "$code"
"""


def _command(job: SubmittedJob) -> str:
    if job.array is None:
        file = str(job.job_files / RUN_FILE)
        return shlex.join(job.host_command(file, directory=str(job.directory), python=job.python))
    sweep = ("sweep", str(job.array.file), "--directory", str(job.directory))
    return shlex.join((job.python, "-m", "shoal", *sweep, "--trial")) + ' "$SLURM_ARRAY_TASK_ID"'


def _header(job: SubmittedJob, options: SlurmOptions) -> Mapping[str, object]:
    asked = job.resources
    header: dict[str, object] = {
        "job-name": job.name,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": asked.cpus_per_node,
        "output": job.job_files / (_LOG if job.array is None else _TASK_LOG),
        "open-mode": "append",
        "chdir": job.folder,
    }
    if job.array is not None:
        header["array"] = f"0-{job.array.tasks - 1}"
        if job.array.parallel < job.array.tasks:
            header["array"] = f"{header['array']}%{job.array.parallel}"
    if asked.gpus_per_node:
        header["gpus-per-node"] = asked.gpus_per_node
    if asked.memory_gib is not None:
        header["mem"] = f"{asked.memory_gib}G"
    if asked.time_s is not None:
        header["time"] = _slurm_time(asked.time_s)
        header["signal"] = f"TERM@{asked.save_s}"
    named = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
    }
    header |= {name: value for name, value in named.items() if value is not None}
    for name, value in header.items():
        plain = re.sub(r"%[jAa]", "", str(value)) if name == "output" else str(value)
        if any(character.isspace() or character in "\"'%" for character in plain) and name != "array":
            raise UsageError(
                f"{name} is {str(value)!r}: a line of #SBATCH cannot hold blanks, quotes or %; rename it, or submit "
                "from another folder"
            )
    return header


def _slurm_time(seconds: int) -> str:
    """D-HH:MM:SS."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"
