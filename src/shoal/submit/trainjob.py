"""A job as a TrainJob of Kubeflow's Trainer (trainer.kubeflow.org), with a runtime of its own.

The runtime brings what the shared ones lack: no pod restarts alone, and the set starts again after 75 but not after 2.
Its `torch` policy sets the `PET_` variables, from which `shoal launch` learns which host it is.
"""

from __future__ import annotations

from typing import Any

from shoal.submit.job import SubmittedJob
from shoal.submit.jobset import QUEUE_LABEL
from shoal.submit.pods import (
    CONTAINER,
    KubernetesOptions,
    config_map,
    failure_policy,
    job_spec,
    metadata_of,
    object_name,
)

API = "trainer.kubeflow.org/v1alpha1"
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
        "apiVersion": API,
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
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": asked.nodes, "numProcPerNode": asked.ranks_per_node},
        },
    }
    return [config_map(job, options), runtime, train]
