"""Slurm as a scheduler: `sbatch`, `squeue`, `scontrol` and `scancel`."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.load import dumps_set
from shoal.errors import EnvironmentFault, Stopped, UsageError
from shoal.submit.job import SubmittedJob
from shoal.submit.scheduler import State, Status, Submission, call, said
from shoal.units import plural

# The batch script of a job for Slurm: one `srun` task a host, which starts the host's ranks.
#
#     the ranks leave with 75   the script asks for its own requeue; the job resumes from its checkpoint
#     before the time limit     `--signal` sends SIGTERM to the ranks, which save and leave with 75
#     a host is lost            Slurm itself requeues the job (`--requeue`)
#     any other code            the job ends with it
#
# A sweep is one array: each task trains a trial on one host, and is queued again by itself.
#
# Slurm starts a job when all of its hosts are free, so all ranks start or none. A task a host, not a task a rank: every
# rank then sees all GPUs of its host, as under torchrun, and the host's launcher names the rank that failed first.


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


_STATES: Mapping[str, State] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "CONFIGURING": "waiting",
    "SUSPENDED": "waiting",
    "RUNNING": "running",
    "COMPLETING": "running",
    "COMPLETED": "done",
}
"""What Slurm calls the states in which a job goes on or has succeeded; in any other it has failed."""
_REASONS = {
    "Resources": "its hosts are busy",
    "Priority": "other jobs come first",
    "BeginTime": "it was queued again a moment ago",
    "PartitionTimeLimit": "its --time is longer than the partition allows",
    "PartitionNodeLimit": "it asks for more hosts than the partition has or allows",
    "PartitionDown": "the partition is down",
    "JobHeldUser": "it is held (scontrol release lets it go)",
    "JobHeldAdmin": "an administrator holds it",
}


_NO_CLUSTER = ("configuration source", "unable to contact slurm controller", "unable to open slurm.conf")
_NOT_KNOWN = ("authentication", "credential", "munge")
"""What Slurm's clients complain of without a controller, and where it does not believe this host."""


class Slurm:
    """The cluster that this host's Slurm commands talk to."""

    def __init__(self, options: SlurmOptions = SlurmOptions()) -> None:
        self._options = options

    def files(self, job: SubmittedJob) -> Mapping[str, str]:
        """The batch script, and the run file that it names; a sweep's and a script's job name none."""
        script = {SCRIPT: batch_script(job, self._options)}
        return script if job.array is not None or job.script else script | {RUN_FILE: dumps_set(job.run_file)}

    def submit(self, job: SubmittedJob) -> Submission:
        """Hand the script to `sbatch`.

        Raises `UsageError` for a partition that there is not, and `EnvironmentFault` for a job too large to start.
        """
        self._check_size(job)
        done = call(["sbatch", "--parsable", str(job.job_files / SCRIPT)])
        identity, _, cluster = done.stdout.strip().partition(";")
        if done.returncode != 0 or not identity.isdigit():
            raise self._refusal(said(done), job)
        where = {"cluster": cluster} if cluster else {}
        return Submission("slurm", identity, where | ({"tasks": str(job.array.tasks)} if job.array else {}))

    def status(self, submission: Submission) -> Status:
        """From `scontrol`, which knows a job until some minutes after its end."""
        done = call(["scontrol", *_on(submission), "--oneliner", "show", "job", submission.identity])
        if done.returncode == 0 and "tasks" in submission.where:
            return _status_of_tasks(submission, done.stdout)
        fields = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
        if done.returncode != 0 or "JobState" not in fields:
            return Status("unknown", f"Slurm does not know job {submission.identity} any more ({said(done)})")
        return _status(submission.identity, fields)

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """`tail` on the file that the batch script writes, or on those of an array's tasks."""
        if "tasks" in submission.where:
            there = sorted((directory / "submit").glob(f"slurm-{submission.identity}_*.log"))
            return ["tail", "-n", "+1", *map(str, there)] if there else []
        path = directory / "submit" / f"slurm-{submission.identity}.log"
        return ["tail", "-n", "+1", str(path)] if path.exists() else []

    def cancel(self, submission: Submission) -> None:
        """Take the requeue away first: ranks that save would otherwise bring the job back."""
        on = _on(submission)
        call(["scontrol", *on, "update", f"JobId={submission.identity}", "Requeue=0"])
        done = call(["scancel", *on, submission.identity])
        if done.returncode != 0:
            raise EnvironmentFault(
                f"Slurm did not cancel job {submission.identity} ({said(done)}): try scancel by hand"
            )

    def _check_size(self, job: SubmittedJob) -> None:
        # Most clusters queue a job that asks for more than there is: it would wait for it without an end.
        asked, partition = job.resources, self._options.partition
        where = [f"--partition={partition}"] if partition else []
        hosts = _hosts(call(["sinfo", "--noheader", "--format=%P|%D|%c|%m|%G", *where]).stdout, default=not partition)
        if not hosts:
            return
        there = sum(host.count for host in hosts)
        if there < asked.nodes:
            raise self._too_large(job, f"{plural(there, 'host')} in all")
        for most, wanted, unit in (
            (max(host.cores for host in hosts), asked.cpus_per_node, "cores"),
            (max(host.memory_mb for host in hosts) // 1024, asked.memory_gib or 0, "GiB of memory"),
            (max(host.gpus for host in hosts), asked.gpus_per_node, "GPUs"),
        ):
            if most < wanted:
                raise self._too_large(job, f"hosts of at most {most} {unit}")

    def _too_large(self, job: SubmittedJob, complaint: str) -> EnvironmentFault:
        there = call(["sinfo", "--noheader", "--format=%R: %D hosts of %c cores, %m MB, %G"]).stdout.splitlines()
        asked = job.resources
        memory = f", {asked.memory_gib} GiB" if asked.memory_gib is not None else ""
        return EnvironmentFault(
            f"the cluster cannot hold the job ({complaint}): it asks for {plural(asked.nodes, 'host')} of "
            f"{plural(asked.cpus_per_node, 'core')}{memory} and {plural(asked.gpus_per_node, 'GPU')}, and there are "
            f"{'; '.join(there) or 'none'}; ask for less, or let shoal plan find a layout that fits"
        )

    def _refusal(self, complaint: str, job: SubmittedJob) -> UsageError | EnvironmentFault:
        if "invalid partition" in complaint.lower():
            there = call(["sinfo", "--noheader", "--format=%R"]).stdout.split()
            return UsageError(
                f"there is no partition {self._options.partition} in this cluster: it has "
                f"{', '.join(there) or 'none'}; give one of them with --partition"
            )
        if "node configuration is not available" in complaint.lower() or "node count" in complaint.lower():
            return self._too_large(job, complaint)
        if any(words in complaint.lower() for words in _NO_CLUSTER):
            return EnvironmentFault(
                f"no Slurm cluster answers this host ({complaint}): submit on one that belongs to it (scontrol ping "
                "works there), or write the job file with --dry-run"
            )
        if any(words in complaint.lower() for words in _NOT_KNOWN):
            return EnvironmentFault(
                f"the cluster refused this host's credentials ({complaint}): munge has to run here, with the cluster's "
                "key and clock (munge -n | unmunge)"
            )
        return EnvironmentFault(f"Slurm did not take the job ({complaint}): change what it names, then submit again")


@dataclass(frozen=True)
class _Hosts:
    """Hosts of a partition that are alike."""

    count: int
    cores: int
    memory_mb: int
    gpus: int


def _hosts(listed: str, *, default: bool) -> list[_Hosts]:
    """What `sinfo` lists, of the default partition alone (marked *) where there is one and `default` says so."""
    lines = [line.split("|") for line in listed.splitlines() if line.count("|") == 4]
    starred = [line for line in lines if line[0].endswith("*")]
    found = []
    for _, count, cores, memory, resources in starred if default and starred else lines:
        numbers = [int(text) for text in re.findall(r"(\d+)[^|]*", f"{count}|{cores}|{memory}")]
        if len(numbers) == 3:
            gpus = sum(int(each) for each in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))
            found.append(_Hosts(numbers[0], numbers[1], numbers[2], gpus))
    return found


def _status(identity: str, fields: Mapping[str, str]) -> Status:
    word, hosts = fields["JobState"], fields.get("NodeList", "")
    state, again = _STATES.get(word, "failed"), int(fields.get("Restarts", 0))
    started = f", started again {plural(again, 'time')}" if again else ""
    if state == "waiting":
        reason = fields.get("Reason", "None")
        because = next((text for name, text in _REASONS.items() if reason.startswith(name)), reason.replace("_", " "))
        return Status(
            state, f"job {identity} waits, no rank has started: {because} ({reason}); all hosts start together{started}"
        )
    if state == "running":
        return Status(state, f"job {identity} runs on {hosts} for {fields.get('RunTime', '?')}{started}")
    code = fields.get("ExitCode", "?").partition(":")[0]
    words = "is done" if state == "done" else f"ended: {word.lower()}, exit code {code}"
    return Status(state, f"job {identity} {words}{started}")


def _status_of_tasks(submission: Submission, shown: str) -> Status:
    """Of an array: `scontrol` shows a line for each task that has started, and one for those that wait."""
    counts: Counter[State] = Counter()
    failed = []
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        state = _STATES.get(fields.get("JobState", ""), "failed")
        tasks = fields.get("ArrayTaskId", "")
        counts[state] += _count(tasks)
        failed += [tasks] if state == "failed" else []
    total = int(submission.where["tasks"])
    counts["unknown"] = max(0, total - sum(counts.values()))
    states: tuple[State, ...] = ("done", "running", "waiting", "failed", "unknown")
    told = ", ".join(
        f"{counts[state]} {'forgotten by Slurm' if state == 'unknown' else state}" for state in states if counts[state]
    )
    order: tuple[State, ...] = ("running", "waiting", "failed", "unknown", "done")
    present: list[State] = [one for one in order if counts[one]]
    named = f"; the failed ones are {', '.join(failed[:8])}" if failed else ""
    return Status(
        present[0] if present else "unknown", f"array {submission.identity} of {plural(total, 'trial')}: {told}{named}"
    )


def _count(tasks: str) -> int:
    """How many tasks "7" or "2-4,6%2" names."""
    spans = [part.split("-") for part in tasks.partition("%")[0].split(",") if part]
    return sum(int(span[-1].partition(":")[0]) - int(span[0]) + 1 for span in spans)


def _on(submission: Submission) -> list[str]:
    cluster = submission.where.get("cluster")
    return ["--cluster", cluster] if cluster else []
