"""Kubernetes as a scheduler: `kubectl`, with a JobSet or a TrainJob."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.errors import EnvironmentFault, ShoalError, UsageError
from shoal.submit import yaml
from shoal.submit.client import call, said
from shoal.submit.job import Job
from shoal.submit.jobset import jobset
from shoal.submit.pods import KubernetesOptions, object_name
from shoal.submit.scheduler import State, Status, Submission
from shoal.submit.trainjob import trainjob
from shoal.units import plural

Kind = Literal["jobset", "trainjob"]
MANIFEST = "job.yaml"
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_INSTALL = {"jobset": "JobSet (jobset.sigs.k8s.io)", "trainjob": "Kubeflow's Trainer (trainer.kubeflow.org)"}
_ENDED: Mapping[str, State] = {"Completed": "done", "Complete": "done", "Failed": "failed"}
_MOST_LOGS = 256


class Kubernetes:
    """The cluster of kubectl's current context. `options` are needed to write and submit a job, not to ask for one."""

    def __init__(self, options: KubernetesOptions | None = None, kind: Kind = "jobset") -> None:
        self._options, self._kind = options, kind

    def files(self, job: Job) -> Mapping[str, str]:
        """The manifest: all objects in one file."""
        objects = (jobset if self._kind == "jobset" else trainjob)(job, self._need_options())
        return {MANIFEST: yaml.documents(objects)}

    def submit(self, job: Job) -> Submission:
        """Let the server check all objects, then apply them."""
        path, options = str(job.job_files / MANIFEST), self._need_options()
        for check in (["--dry-run=server"], []):
            done = call(["kubectl", "apply", *check, "--filename", path])
            if done.returncode != 0:
                raise _refusal(said(done), self._kind)
        return Submission("kubernetes", object_name(job), {"namespace": options.namespace, "kind": self._kind})

    def status(self, submission: Submission) -> Status:
        """From the object's conditions."""
        kind, name = submission.where["kind"], submission.identity
        done = call(["kubectl", *_in(submission), "get", kind, name, "--output=json", "--ignore-not-found"])
        if done.returncode != 0:
            raise _refusal(said(done), kind)
        if not done.stdout.strip():
            return Status("unknown", f"the cluster has no {kind} {name} any more")
        return _status(kind, name, json.loads(done.stdout))

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """`kubectl logs` of all pods; a TrainJob's set has its name."""
        label = f"--selector={NAME_LABEL}={submission.identity}"
        return ["kubectl", *_in(submission), "logs", label, "--prefix", "--tail=-1", f"--max-log-requests={_MOST_LOGS}"]

    def cancel(self, submission: Submission) -> None:
        """Delete the object; its pods get SIGTERM, and the time of their grace period to save."""
        kind, name = submission.where["kind"], submission.identity
        done = call(["kubectl", *_in(submission), "delete", kind, name, "--wait=false", "--ignore-not-found"])
        if done.returncode != 0:
            raise _refusal(said(done), kind)

    def _need_options(self) -> KubernetesOptions:
        if self._options is None:
            raise UsageError("a job for Kubernetes needs an image and a volume: give --image and --volume")
        return self._options


def _status(kind: str, name: str, found: Mapping[str, Any]) -> Status:
    status = found.get("status", {})
    restarts = status.get("restarts", 0)
    again = f", started again {plural(restarts, 'time')}" if restarts else ""
    for condition in status.get("conditions", []):
        if condition.get("status") == "True" and condition.get("type") in _ENDED:
            state = _ENDED[condition["type"]]
            words = "is done" if state == "done" else f"failed: {condition.get('message', 'no message')}"
            return Status(state, f"{kind} {name} {words}{again}")
    if found.get("spec", {}).get("suspend"):
        return Status("waiting", f"{kind} {name} waits, no rank has started: its queue has no room for all pods{again}")
    jobs = status.get("replicatedJobsStatus", status.get("jobsStatus", []))
    if not any(job.get("ready", 0) or job.get("succeeded", 0) for job in jobs):
        return Status("waiting", f"{kind} {name} waits until all of its pods have started{again}")
    return Status("running", f"{kind} {name} runs{again}")


def _refusal(complaint: str, kind: str) -> ShoalError:
    lower = complaint.lower()
    if "no matches for kind" in lower or "doesn't have a resource type" in lower:
        return EnvironmentFault(
            f"the cluster knows no {kind} ({complaint}): install {_INSTALL[kind]} in it, or give another --kind"
        )
    if "unauthorized" in lower or "expired" in lower or "must be logged in" in lower:
        return EnvironmentFault(
            f"the cluster refused kubectl's credentials ({complaint}): log in again, then repeat the command"
        )
    if "refused" in lower or "unable to connect" in lower or "no such host" in lower or "timeout" in lower:
        return EnvironmentFault(
            f"no cluster answers ({complaint}): see kubectl config get-contexts, or write the job file with --dry-run"
        )
    if "immutable" in lower:
        return UsageError(
            f"a {kind} of this name is in the cluster already ({complaint}): shoal submit cancel it first, or give "
            "another run.name"
        )
    return EnvironmentFault(f"the cluster did not take the job ({complaint}): change what it names, then submit again")


def _in(submission: Submission) -> list[str]:
    return ["--namespace", submission.where["namespace"]]
