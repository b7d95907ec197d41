"""A job as the objects that `kubectl` is given.

A job as a JobSet (jobset.sigs.k8s.io): one indexed SubmittedJob of a pod a host behind a headless service.

With a queue of Kueue's, the set stays suspended until the cluster has room for all of its pods, so that all start or
none. Without one, pods that start wait for the others, up to `run.start_timeout_s`, and train only together.

A job as a TrainJob of Kubeflow's Trainer (trainer.kubeflow.org), with a runtime of its own.

The runtime brings what the shared ones lack: no pod restarts alone, and the set starts again after 75 but not after 2.
Its `torch` policy sets the `PET_` variables, from which `shoal launch` learns which host it is.
"""

from __future__ import annotations

from typing import Any

from shoal.submit.job import SubmittedJob
from shoal.submit.pods import (
    CONTAINER,
    KubernetesOptions,
    config_map,
    failure_policy,
    host_variables,
    job_spec,
    metadata_of,
    object_name,
)

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


TRAINER_API = "trainer.kubeflow.org/v1alpha1"
STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"


def trainjob(job: SubmittedJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The objects to apply, in order. Raises `UsageError` for a name or a secret that they cannot hold."""
    name, asked = object_name(job), job.resources
    hosts = {
        "name": CONTAINER,
        "template": {
            "metadata": {"labels": {STEP_LABEL: "trainer"}},
            "spec": job_spec(job, options, variables=[]),
        },
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
