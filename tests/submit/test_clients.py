"""What users read when a scheduler's client is missing, refuses or knows nothing: clients that answer as the real ones.

The complaints are those of sbatch 22.05 and kubectl; the real Slurm is in test_slurm_cluster.py.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.submit.job import Job
from shoal.submit.kubernetes import Kubernetes
from shoal.submit.pods import KubernetesOptions
from shoal.submit.ray_driver import exit_code
from shoal.submit.scheduler import Scheduler, Submission, read_record, write_files, write_record
from shoal.submit.slurm import Slurm
from tests.submit.jobs import job

SET = Submission("kubernetes", "own", {"namespace": "default", "kind": "jobset"})
OPTIONS = KubernetesOptions("image:1", "runs")


@pytest.fixture
def made(tmp_path: Path) -> Job:
    return job("replicas", tmp_path)


def client(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, out: str = "", err: str = "", code: int = 0
) -> None:
    """A program of this name, alone on the PATH, that answers so and notes its arguments in `calls`."""
    script = f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(err)} >&2; exit {code}"
    (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{script}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(("scheduler", "program"), [(Slurm(), "sinfo"), (Kubernetes(OPTIONS), "kubectl")])
def test_a_missing_client_is_a_sentence(
    scheduler: Scheduler, program: str, made: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 3: which program, and what works without it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match=rf"{program} is not on the PATH: .*--dry-run"):
        scheduler.submit(made)


@pytest.mark.parametrize(
    ("complaint", "error", "words"),
    [
        ('no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"', EnvironmentFault, "knows no jobset"),
        ("error: You must be logged in to the server (Unauthorized)", EnvironmentFault, "log in again"),
        ("The connection to the server localhost:8080 was refused", EnvironmentFault, "no cluster answers"),
        ("spec.failurePolicy: Invalid value: Value is immutable", UsageError, "shoal submit cancel it first"),
        ("exceeded quota: team", EnvironmentFault, "did not take the job"),
    ],
)
def test_what_kubectl_complains_of_becomes_a_repair(
    complaint: str, error: type[Exception], words: str, made: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such kind, no credentials, no cluster, a job of this name, and anything else with its own words."""
    client(tmp_path, monkeypatch, "kubectl", err=complaint, code=1)
    with pytest.raises(error, match=words) as raised:
        Kubernetes(OPTIONS).submit(made)
    assert complaint[:20] in str(raised.value)


@pytest.mark.parametrize(
    ("complaint", "words"),
    [
        ("sbatch: fatal: Could not establish a configuration source", "no Slurm cluster answers this host"),
        ("Unable to contact slurm controller (connect failure)", "no Slurm cluster answers this host"),
        ("Protocol authentication error", "refused this host's credentials"),
        ("error: Munge decode failed: Expired credential", "refused this host's credentials"),
        ("Batch job submission failed: Invalid qos specification", "change what it names"),
    ],
)
def test_what_sbatch_complains_of_becomes_a_repair(
    complaint: str, words: str, made: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster, credentials that are not believed or have expired, and anything else with its own words."""
    for program in ("sinfo", "sbatch"):
        client(tmp_path, monkeypatch, program, err=complaint, code=1)
    with pytest.raises(EnvironmentFault, match=words) as raised:
        Slurm().submit(made)
    assert complaint[:20] in str(raised.value)


def test_the_server_checks_a_manifest_before_it_is_applied(
    made: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run of the server's first; its refusal leaves the cluster as it was."""
    client(tmp_path, monkeypatch, "kubectl")
    submission = Kubernetes(OPTIONS).submit(made)
    assert submission == Submission("kubernetes", "digits", {"namespace": "default", "kind": "jobset"})
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.startswith("apply --dry-run=server")
    assert second.startswith("apply --filename")


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        ({"spec": {"suspend": True}}, "waiting", "its queue has no room for all pods"),
        ({"status": {"replicatedJobsStatus": [{"ready": 0}]}}, "waiting", "until all of its pods have started"),
        ({"status": {"replicatedJobsStatus": [{"ready": 1}], "restarts": 2}}, "running", "runs, started again 2 times"),
        ({"status": {"conditions": [{"type": "Completed", "status": "True"}]}}, "done", "is done"),
        (
            {"status": {"conditions": [{"type": "Failed", "status": "True", "message": "exit code 2"}]}},
            "failed",
            "failed: exit code 2",
        ),
    ],
)
def test_the_state_of_a_jobset_is_a_sentence(
    found: dict, state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended by its queue, starting, running, done, failed."""
    client(tmp_path, monkeypatch, "kubectl", out=json.dumps(found))
    status = Kubernetes().status(SET)
    assert status.state == state
    assert words in status.sentence


def test_a_job_that_is_gone_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm forgets jobs some minutes after their end, Kubernetes when they are deleted: no error, but said."""
    client(tmp_path, monkeypatch, "scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert Slurm().status(Submission("slurm", "12")).state == "unknown"
    client(tmp_path, monkeypatch, "kubectl")
    assert Kubernetes().status(SET).state == "unknown"


def test_kubernetes_without_an_image_is_refused(made: Job) -> None:
    """Before anything is written."""
    with pytest.raises(UsageError, match="give --image and --volume"):
        Kubernetes().files(made)


def test_the_record_of_a_submission_comes_back(made: Job) -> None:
    """Written beside the run; a run that was never submitted, or a spoiled record, is a sentence."""
    with pytest.raises(UsageError, match="give the directory of a submitted run"):
        read_record(made.directory)
    write_files(made, {})
    write_record(made, SET)
    assert read_record(made.directory) == SET
    (made.job_files / "submission.json").write_text('{"to": "mars"}')
    with pytest.raises(UsageError, match="is no record of a submission"):
        read_record(made.directory)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([75, 75], 75), ([3, 75], 75), ([3, 2], 2), ([75, 1], 1), ([3, 3], 3), ([137, 3], 137)],
)
def test_the_cause_among_the_codes_of_hosts(codes: list[int], expected: int) -> None:
    """A host's own failure comes before a save, and a save before the loss of another host."""
    assert exit_code(codes) == expected
