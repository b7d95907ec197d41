"""What a job is in any of Kubernetes' own terms: its run file as a ConfigMap, and the pod of a host.

A pod is a host: it runs `shoal launch`, which starts the host's ranks. The pod's index among the job's is its number as
a host. Pods never restart alone (`restartPolicy: Never`), as ranks that have lost one another start together.

    exit code of a host        the Job says                    the set of jobs
    0                          done
    2, 4, 6                    FailJob, "exit code 2"           fails: the same would happen again
    75, or an evicted pod      FailJob, "exit code 75"          starts again, uncounted: it resumes from its checkpoint
    anything else              BackoffLimitExceeded             starts again, at most `--restarts` times

What is alive has taken a step: the probes look for events that are younger than the stall limit.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.load import dumps_set
from shoal.data.named_files import local_files
from shoal.errors import Stopped, UsageError
from shoal.launcher.host import MASTER_ADDR, MASTER_PORT, MASTER_PORT_DEFAULT, NNODES, NODE_RANK, NPROC_PER_NODE
from shoal.runfile.run_file import RunFile
from shoal.submit.job import FATAL_CODES, SubmittedJob

CONTAINER = "node"
RUN_FILE, RUN_FOLDER = "run.toml", "/etc/shoal"
RUNS = "/runs"
OWNER_LABEL, OWNER = "app.kubernetes.io/managed-by", "shoal"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_PROBE_S = 60


@dataclass(frozen=True)
class KubernetesOptions:
    """Where in the cluster the job goes.

    `volume` is a claim for run directories, which all pods mount at `/runs`. `workdir` is the folder of the image or of
    the volume in which pods start: there lie the user's modules and what the run file names relative to it; None: the
    image's own. `spot` are taints to tolerate, `node_selector` labels that hosts must have.
    """

    image: str
    volume: str
    namespace: str = "default"
    queue: str | None = None
    secret: str | None = None
    spot: tuple[str, ...] = ()
    workdir: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    stall_minutes: int = 30


def object_name(job: SubmittedJob) -> str:
    """The run's name as a label of DNS, short enough for what Kubernetes appends. Raises `UsageError`."""
    name = re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")
    if not name or len(name) > 40 or not name[0].isalpha():
        raise UsageError(
            f"run.name is {job.name!r}, which makes no name for Kubernetes: it should begin with a letter and have at "
            "most 40 letters, digits and hyphens; rename the run (run.name=...)"
        )
    return name


def metadata_of(job: SubmittedJob, options: KubernetesOptions) -> dict[str, Any]:
    """The name of what is submitted, and a label that says who did."""
    return {"name": object_name(job), "namespace": options.namespace, "labels": {OWNER_LABEL: OWNER}}


def config_map_name(name: str) -> str:
    """The ConfigMap of the job of this name."""
    return f"{name}-run"


def config_map(job: SubmittedJob, options: KubernetesOptions) -> dict[str, Any]:
    """The run file as pods mount it; its directory lies on the volume."""
    inside = msgspec.structs.replace(
        job.run_file, run=msgspec.structs.replace(job.run_file.run, directory=run_directory_inside(job))
    )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(job, options) | {"name": config_map_name(object_name(job))},
        "data": {RUN_FILE: dumps_set(inside)},
    }


def run_directory_inside(job: SubmittedJob) -> str:
    """The run's folder as pods see it."""
    return f"{RUNS}/{job.name}"


def pod_template(job: SubmittedJob, options: KubernetesOptions, *, variables: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod of a host; `variables` say which host it is and where rank 0 listens."""
    asked = job.resources
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "command": list(
            job.host_command(f"{RUN_FOLDER}/{RUN_FILE}", directory=run_directory_inside(job), python="python3")
        ),
        **_workdir(job, options),
        "env": [*variables, *_own_variables(job, options)],
        "resources": _resources(job, options),
        "ports": [{"name": "store", "containerPort": MASTER_PORT_DEFAULT}],
        "volumeMounts": [
            {"name": "run-file", "mountPath": RUN_FOLDER, "readOnly": True},
            {"name": "runs", "mountPath": RUNS},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **_probes(job, options),
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": asked.save_s,
        # OnRootMismatch: each new start of a pod would else open all files of the volume to the group, the job's token
        # among them, which its owner alone may read.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [container],
        "volumes": [
            {"name": "run-file", "configMap": {"name": config_map_name(object_name(job))}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if tolerations := _tolerations(job, options):
        spec["tolerations"] = tolerations
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    return {"spec": spec}


def job_spec(job: SubmittedJob, options: KubernetesOptions, *, variables: list[dict[str, Any]]) -> dict[str, Any]:
    """A Job of one pod a host, which fails as a whole with the first pod that does."""
    hosts = job.resources.nodes
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_failure_rules()},
        "template": pod_template(job, options, variables=variables),
    }
    if job.resources.time_s is not None:
        spec["activeDeadlineSeconds"] = job.resources.time_s
    return spec


def failure_policy(job: SubmittedJob) -> dict[str, Any]:
    """The set's answer to a Job that failed; the messages are those that Kubernetes writes of its rules."""
    again = [f"exit code {Stopped.exit_code} ", "condition DisruptionTarget "]
    return {
        "maxRestarts": job.restarts,
        "rules": [
            {
                "name": "savedOrEvicted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": again,
            },
            {"name": "wrong", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        ],
    }


def host_variables(job: SubmittedJob, master: str) -> list[dict[str, Any]]:
    """Which host a pod is: the names that torchrun reads, too."""
    return [
        {"name": NNODES, "value": str(job.resources.nodes)},
        {"name": NPROC_PER_NODE, "value": str(job.resources.ranks_per_node)},
        {"name": NODE_RANK, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        {"name": MASTER_ADDR, "value": master},
        {"name": MASTER_PORT, "value": str(MASTER_PORT_DEFAULT)},
    ]


def _workdir(job: SubmittedJob, options: KubernetesOptions) -> dict[str, str]:
    if options.workdir is not None:
        if not options.workdir.startswith("/"):
            raise UsageError(f"--workdir {options.workdir!r} is no absolute path: pods know no other; write /runs/code")
        return {"workingDir": options.workdir}
    there = _local_names(job.run_file, job.folder) | ({"the job": job.script[0]} if job.script else {})
    for key, name in there.items():
        raise UsageError(
            f"{key} needs {name}, which lies in {job.folder}, and pods do not have that folder: copy it into the image "
            f"or onto the volume, and give its folder there with --workdir (such as {RUNS}/code)"
        )
    return {}


def _local_names(run_file: RunFile, folder: Path) -> dict[str, str]:
    """Modules of the user's and files of data that the run file names and that lie in `folder`, by the key that needs
    them: a pod has neither that folder nor what lies in it.
    """
    found = dict(_modules(msgspec.to_builtins(run_file), "", folder))
    data = next((name for name in local_files(run_file.data, folder) if not os.path.isabs(name)), None)
    return found | ({} if data is None else {"data": data})


def _modules(table: dict[str, Any], path: str, folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _modules(value, f"{path}{key}.", folder)
        elif key == "build" and isinstance(value, str):
            name = value.partition(":")[0].partition(".")[0]
            found += [(f"{path}{key}", there) for there in (f"{name}.py", name) if name and (folder / there).exists()]
    return found


def node_selector_of(labels: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`NAME=VALUE` labels as pairs. Raises `UsageError`."""
    pairs = [label.partition("=") for label in labels]
    for label, (name, equals, _) in zip(labels, pairs, strict=True):
        if not name or not equals:
            raise UsageError(f"--node-selector {label!r} is no label: write NAME=VALUE")
    return tuple((name, value) for name, _, value in pairs)


def _own_variables(job: SubmittedJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    if job.secrets and options.secret is None:
        raise UsageError(
            f"--env {job.secrets[0]} is a secret, and a job file must not hold its value: "
            "name the cluster's Secret that has it as a key (--secret NAME)"
        )
    plain = [{"name": name, "value": value} for name, value in sorted(job.variables.items())]
    hidden = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": options.secret, "key": name}}} for name in job.secrets
    ]
    return plain + hidden


def _resources(job: SubmittedJob, options: KubernetesOptions) -> dict[str, Any]:
    asked = job.resources
    amounts: dict[str, str] = {"cpu": str(asked.cpus_per_node)}
    if asked.memory_gib is not None:
        amounts["memory"] = f"{asked.memory_gib}Gi"
    if asked.gpus_per_node:
        amounts[options.gpu_resource] = str(asked.gpus_per_node)
    return {"requests": amounts, "limits": dict(amounts)}


def _tolerations(job: SubmittedJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    tolerations: list[dict[str, Any]] = []
    if job.resources.gpus_per_node:
        tolerations.append({"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    for taint in options.spot:
        key, equals, value = taint.partition("=")
        match = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **match, "effect": "NoSchedule"})
    return tolerations


def _probes(job: SubmittedJob, options: KubernetesOptions) -> dict[str, Any]:
    events = shlex.quote(f"{run_directory_inside(job)}/events")
    recent = f'test -n "$(find {events} -name "rank-*.jsonl" -mmin -{options.stall_minutes} -print -quit)"'
    probe = {"exec": {"command": ["sh", "-c", recent]}, "periodSeconds": _PROBE_S, "timeoutSeconds": 30}
    # Before the first step the ranks wait for each other, up to `run.start_timeout_s`, and load data.
    starts = int(job.run_file.run.start_timeout_s // _PROBE_S) + options.stall_minutes
    return {"startupProbe": {**probe, "failureThreshold": starts}, "livenessProbe": {**probe, "failureThreshold": 3}}


def _pod_failure_rules() -> list[dict[str, Any]]:
    def fails(codes: tuple[int, ...]) -> dict[str, Any]:
        codes_in = {"containerName": CONTAINER, "operator": "In", "values": list(codes)}
        return {"action": "FailJob", "onExitCodes": codes_in}

    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [fails((Stopped.exit_code,)), evicted, fails(FATAL_CODES)]


# A job as a JobSet (jobset.sigs.k8s.io): one indexed Job of a pod a host behind a headless service.
#
# With a queue of Kueue's, the set stays suspended until the cluster has room for all of its pods, so that all start or
# none. Without one, pods that start wait for the others, up to `run.start_timeout_s`, and train only together.


JOBSET_API, KIND = "jobset.x-k8s.io/v1alpha2", "JobSet"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
HOSTS = "hosts"


def jobset(job: SubmittedJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The objects to apply, in order. Raises `UsageError` for a name or a secret that they cannot hold."""
    name = object_name(job)
    metadata = metadata_of(job, options)
    if options.queue is not None:
        metadata["labels"][QUEUE_LABEL] = options.queue
    # Pod 0 of job 0, by the name that the headless service gives it.
    variables = host_variables(job, f"{name}-{HOSTS}-0-0.{name}")
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": failure_policy(job),
        "replicatedJobs": [
            {"name": HOSTS, "replicas": 1, "template": {"spec": job_spec(job, options, variables=variables)}}
        ],
    }
    return [config_map(job, options), {"apiVersion": JOBSET_API, "kind": KIND, "metadata": metadata, "spec": spec}]


# A job as a TrainJob of Kubeflow's Trainer (trainer.kubeflow.org), with a runtime of its own.
#
# The runtime brings what the shared ones lack: no pod restarts alone, and the set starts again after 75 but not after
# 2. Its `torch` policy sets the `PET_` variables, from which `shoal launch` learns which host it is.


TRAINER_API = "trainer.kubeflow.org/v1alpha1"
STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"


def trainjob(job: SubmittedJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The objects to apply, in order. Raises `UsageError` for a name or a secret that they cannot hold."""
    name, asked = object_name(job), job.resources
    hosts = {
        "name": CONTAINER,
        "template": {"metadata": {"labels": {STEP_LABEL: "trainer"}}, "spec": job_spec(job, options, variables=[])},
    }
    runtime = {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": metadata_of(job, options),
        "spec": {
            "mlPolicy": {"numNodes": asked.nodes, "torch": {}},
            "template": {"spec": {"failurePolicy": failure_policy(job), "replicatedJobs": [hosts]}},
        },
    }
    metadata = metadata_of(job, options)
    if options.queue is not None:
        metadata["labels"][QUEUE_LABEL] = options.queue
    train = {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": asked.nodes, "numProcPerNode": asked.ranks_per_node},
        },
    }
    return [config_map(job, options), runtime, train]
