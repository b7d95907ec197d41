"""Slurm as a scheduler: `sbatch`, `squeue`, `scontrol` and `scancel`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.config.load import dumps
from shoal.errors import EnvironmentFault, UsageError
from shoal.submit.client import call, said
from shoal.submit.job import Job
from shoal.submit.scheduler import State, Status, Submission
from shoal.submit.slurm_script import RUN_FILE, SCRIPT, SlurmOptions, batch_script
from shoal.units import plural

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

    def files(self, job: Job) -> Mapping[str, str]:
        """The batch script, and the resolved run file that it names."""
        return {SCRIPT: batch_script(job, self._options), RUN_FILE: dumps(job.run_file)}

    def submit(self, job: Job) -> Submission:
        """Hand the script to `sbatch`.

        Raises `UsageError` for a partition that there is not, and `EnvironmentFault` for a job too large to start.
        """
        self._check_size(job)
        done = call(["sbatch", "--parsable", str(job.job_files / SCRIPT)])
        identity, _, cluster = done.stdout.strip().partition(";")
        if done.returncode != 0 or not identity.isdigit():
            raise self._refusal(said(done), job)
        return Submission("slurm", identity, {"cluster": cluster} if cluster else {})

    def status(self, submission: Submission) -> Status:
        """From `scontrol`, which knows a job until some minutes after its end."""
        done = call(["scontrol", *_on(submission), "--oneliner", "show", "job", submission.identity])
        fields = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
        if done.returncode != 0 or "JobState" not in fields:
            return Status("unknown", f"Slurm does not know job {submission.identity} any more ({said(done)})")
        return _status(submission.identity, fields)

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """`tail` on the file that the batch script writes."""
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

    def _check_size(self, job: Job) -> None:
        # Most clusters queue a job that asks for more hosts than there are: it would wait for them without an end.
        where = [f"--partition={self._options.partition}"] if self._options.partition else []
        counts = call(["sinfo", "--noheader", "--format=%D", *where]).stdout.split()
        there = sum(int(count) for count in counts if count.isdigit())
        if 0 < there < job.resources.nodes:
            raise self._too_large(job, f"{plural(there, 'host')} in all")
        cores = re.findall(r"\d+", call(["sinfo", "--noheader", "--format=%c", *where]).stdout)
        if cores and max(map(int, cores)) < job.resources.cpus_per_node:
            raise self._too_large(job, f"hosts of at most {max(map(int, cores))} cores")

    def _too_large(self, job: Job, complaint: str) -> EnvironmentFault:
        there = call(["sinfo", "--noheader", "--format=%R: %D hosts of %c cores, %m MB, %G"]).stdout.splitlines()
        asked = job.resources
        return EnvironmentFault(
            f"the cluster cannot hold the job ({complaint}): it asks for {plural(asked.nodes, 'host')} of "
            f"{plural(asked.cpus_per_node, 'core')} and {plural(asked.gpus_per_node, 'GPU')}, and there are "
            f"{'; '.join(there) or 'none'}; ask for less, or let shoal plan find a layout that fits"
        )

    def _refusal(self, complaint: str, job: Job) -> UsageError | EnvironmentFault:
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


def _on(submission: Submission) -> list[str]:
    cluster = submission.where.get("cluster")
    return ["--cluster", cluster] if cluster else []
