"""Kubernetes as a scheduler: `kubectl`, with a JobSet or a TrainJob."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.errors import EnvironmentFault, ShoalError, UsageError
from shoal.submit.job import SubmittedJob
from shoal.submit.pods import OWNER, OWNER_LABEL, KubernetesOptions, config_map_name, jobset, object_name, trainjob
from shoal.submit.scheduler import State, Status, Submission, call, said
from shoal.units import plural

# Objects as YAML in block style: dictionaries, lists, texts, whole numbers, booleans. What YAML 1.2 reads, no more.
#
# A text is written plain only where no reader could take it for anything else; else as JSON writes it, which is YAML
# too, or as a literal block where it has lines.


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")
_TAKEN = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""What YAML 1.1 reads as something other than a text."""


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """The objects, one document each."""
    return "---\n".join("\n".join(_block(document)) + "\n" for document in objects)


def _block(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _entry(f"{_text(key)}:", inner)]
    if isinstance(value, list) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, str) and "\n" in value and value.endswith("\n") and not value.startswith((" ", "\n")):
        keep = "|+" if value.endswith("\n\n") else "|"
        return [f"{key} {keep}", *(f"  {line}" if line else "" for line in value[:-1].split("\n"))]
    if isinstance(value, Mapping | list) and value:
        return [key, *(f"  {line}" if line else "" for line in _block(value))]
    return [f"{key} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _block(value)
    return [f"- {first}", *(f"  {line}" if line else "" for line in rest)]


def _scalar(value: Any) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _TAKEN else json.dumps(text)


Kind = Literal["jobset", "trainjob"]
MANIFEST, RUNTIME = "job.yaml", "runtime.yaml"
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_INSTALL = {"jobset": "JobSet (jobset.sigs.k8s.io)", "trainjob": "Kubeflow's Trainer (trainer.kubeflow.org)"}
_ENDED: Mapping[str, State] = {"Completed": "done", "Complete": "done", "Failed": "failed"}
_MOST_LOGS = 256
_STARTING = ("ContainerCreating", "PodInitializing")
"""Reasons of pods that are about to start."""
_GONE_S = 50
"""How long an ended job may take to go, with all of its pods."""


class Kubernetes:
    """The cluster of kubectl's current context. `options` are needed to write and submit a job, not to ask for one."""

    def __init__(self, options: KubernetesOptions | None = None, kind: Kind = "jobset") -> None:
        self._options, self._kind = options, kind

    def files(self, job: SubmittedJob) -> Mapping[str, str]:
        """The manifest of the job, and of what it names; where the server checks both at once, in one file."""
        options = self._need_options()
        if self._kind == "jobset":
            return {MANIFEST: documents(jobset(job, options))}
        config, runtime, train = trainjob(job, options)
        return {RUNTIME: documents([config, runtime]), MANIFEST: documents([train])}

    def submit(self, job: SubmittedJob) -> Submission:
        """Let the server check all objects, then apply them. An ended job of this name makes room.

        A TrainJob is checked against the runtime in the cluster, so that is there first; it goes again where the job is
        refused. Raises `UsageError` where a job of this name has not ended or is not Shoal's.
        """
        options = self._need_options()
        where = {"namespace": options.namespace, "kind": self._kind}
        submission = Submission("kubernetes", object_name(job), where)
        self._make_room(submission)
        try:
            for name in self.files(job):
                for check in (["--dry-run=server"], []):
                    self._call(submission, "apply", *check, "--filename", str(job.job_files / name))
        except ShoalError:
            if self._kind == "trainjob":
                call(_delete(submission))
            raise
        return submission

    def status(self, submission: Submission) -> Status:
        """From the object's conditions."""
        kind, name = submission.where["kind"], submission.identity
        found = self._found(submission)
        if found is None:
            return Status("unknown", f"the cluster has no {kind} {name} any more")
        status = _status(kind, name, found)
        if status.state != "waiting":
            return status
        label = f"--selector={NAME_LABEL}={name}"
        pods = json.loads(self._call(submission, "get", "pods", label, "--output=json") or "{}").get("items", [])
        return Status(status.state, status.sentence + _obstacles(pods))

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        """`kubectl logs` of all pods; a TrainJob's set has its name."""
        label = f"--selector={NAME_LABEL}={submission.identity}"
        return ["kubectl", *_in(submission), "logs", label, "--prefix", "--tail=-1", f"--max-log-requests={_MOST_LOGS}"]

    def cancel(self, submission: Submission) -> None:
        """Delete the object and what was made for it; its pods get SIGTERM, and their grace period to save in."""
        done = call(_delete(submission))
        if done.returncode != 0:
            raise _refusal(said(done), submission.where["kind"])

    def _make_room(self, submission: Submission) -> None:
        # To apply an ended job again changes nothing: it would not start.
        found = self._found(submission)
        if found is None:
            return
        kind, name = submission.where["kind"], submission.identity
        if found.get("metadata", {}).get("labels", {}).get(OWNER_LABEL) != OWNER:
            raise UsageError(
                f"a {kind} {name} that Shoal did not submit is in the cluster: delete it, or give another run.name"
            )
        if _status(kind, name, found).state not in ("done", "failed"):
            raise UsageError(
                f"{kind} {name} is in the cluster already and has not ended: shoal submit cancel it first, or give "
                "another run.name"
            )
        self._call(
            submission, "delete", kind, name, "--cascade=foreground", "--ignore-not-found", f"--timeout={_GONE_S}s"
        )

    def _found(self, submission: Submission) -> dict[str, Any] | None:
        kind, name = submission.where["kind"], submission.identity
        text = self._call(submission, "get", kind, name, "--output=json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def _call(self, submission: Submission, verb: str, *arguments: str) -> str:
        done = call(["kubectl", *_in(submission), verb, *arguments])
        if done.returncode != 0:
            raise _refusal(said(done), submission.where["kind"])
        return done.stdout

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


def _obstacles(pods: Sequence[Mapping[str, Any]]) -> str:
    """Why pods have not started, each reason once with one of its pods; empty where there is none."""
    found: dict[str, tuple[str, str, int]] = {}
    for pod in pods:
        name, status = pod.get("metadata", {}).get("name", "?"), pod.get("status", {})
        conditions = [one for one in status.get("conditions", []) if one.get("type") == "PodScheduled"]
        waiting = [one.get("state", {}).get("waiting") or {} for one in status.get("containerStatuses", [])]
        for one in [*(one for one in conditions if one.get("status") == "False"), *waiting]:
            reason = one.get("reason")
            if reason and reason not in _STARTING:
                first, words, before = found.get(reason, (name, " ".join(str(one.get("message", "")).split())[:200], 0))
                found[reason] = (first, words, before + 1)
    told = [
        f"{reason} ({plural(count, 'pod')}, such as {name}{': ' + words if words else ''})"
        for reason, (name, words, count) in sorted(found.items())
    ]
    return f"; {'; '.join(told)}" if told else ""


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


def _delete(submission: Submission) -> list[str]:
    name = submission.identity
    made = [f"configmap/{config_map_name(name)}", *([f"trainingruntime/{name}"] if _is_train(submission) else [])]
    job = f"{submission.where['kind']}/{name}"
    return ["kubectl", *_in(submission), "delete", job, *made, "--wait=false", "--ignore-not-found"]


def _is_train(submission: Submission) -> bool:
    return submission.where["kind"] == "trainjob"


def _in(submission: Submission) -> list[str]:
    return ["--namespace", submission.where["namespace"]]
