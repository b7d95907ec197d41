"""A job as Ray's driver reads it: what each host gives, how hosts are placed, and the command of each.

    STRICT_SPREAD   a bundle of the placement group on every host, each on another: the default
    PACK            bundles on as few hosts as hold them

Ray reserves all bundles of a placement group or none, so all ranks start or none.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.submit.job import SubmittedJob

DESCRIPTION, RUN_FILE = "ray-job.json", "run.toml"
GIB = 1 << 30
Strategy = Literal["STRICT_SPREAD", "PACK"]


class RayJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the driver is told. `bundle` counts CPUs, GPUs and bytes of memory of a host; `wait_s` bounds the wait for
    room in the cluster. Hosts start in `folder`; empty: in the working directory that the job brought along.
    """

    name: str
    hosts: int
    ranks_per_node: int
    bundle: dict[str, float]
    strategy: Strategy
    command: tuple[str, ...]
    folder: str
    variables: dict[str, str]
    secrets: tuple[str, ...]
    restarts: int
    wait_s: float
    save_s: float
    address: str


def ray_job(job: SubmittedJob, *, address: str, strategy: Strategy, wait_s: float) -> RayJob:
    """The description of a job for the cluster at `address` ("auto": the one that this host belongs to)."""
    asked = job.resources
    bundle = {"CPU": float(asked.cpus_per_node)}
    if asked.gpus_per_node:
        bundle["GPU"] = float(asked.gpus_per_node)
    if asked.memory_gib is not None:
        bundle["memory"] = float(asked.memory_gib * GIB)
    command = job.host_command(str(job.job_files / RUN_FILE), directory=str(job.directory), python=job.python)
    return RayJob(
        name=job.name,
        hosts=asked.nodes,
        ranks_per_node=asked.ranks_per_node,
        bundle=bundle,
        strategy=strategy,
        command=command,
        folder=str(job.folder),
        variables=dict(job.variables),
        secrets=job.secrets,
        restarts=job.restarts,
        wait_s=wait_s,
        save_s=asked.save_s,
        address=address,
    )
