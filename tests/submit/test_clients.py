"""What users read when a scheduler's client is missing, refuses or knows nothing: clients that answer as the real ones.

The complaints are those of sbatch 22.05 and kubectl; the real Slurm is in test_slurm_cluster.py.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.submit.job import SubmittedJob
from shoal.submit.kubernetes import Kind, Kubernetes
from shoal.submit.pods import KubernetesOptions
from shoal.submit.ray_driver import exit_code
from shoal.submit.scheduler import (
    Scheduler,
    State,
    Status,
    Submission,
    follow,
    read_record,
    said,
    write_files,
    write_record,
)
from shoal.submit.slurm import Slurm, SlurmOptions
from tests.submit.cluster import Cluster, install
from tests.submit.jobs import job

SET = Submission("kubernetes", "own", {"namespace": "default", "kind": "jobset"})
OPTIONS = KubernetesOptions("image:1", "runs")


@pytest.fixture
def made(tmp_path: Path) -> SubmittedJob:
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
    scheduler: Scheduler, program: str, made: SubmittedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    complaint: str,
    error: type[Exception],
    words: str,
    made: SubmittedJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    complaint: str, words: str, made: SubmittedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster, credentials that are not believed or have expired, and anything else with its own words."""
    for program in ("sinfo", "sbatch"):
        client(tmp_path, monkeypatch, program, err=complaint, code=1)
    with pytest.raises(EnvironmentFault, match=words) as raised:
        Slurm().submit(made)
    assert complaint[:20] in str(raised.value)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """An empty cluster, whose kubectl is alone on the PATH."""
    pytest.importorskip("yaml", reason="PyYAML reads the manifests that kubectl is given")
    monkeypatch.setenv("PATH", str(tmp_path))
    return install(tmp_path / "cluster", tmp_path)


KINDS = {
    "jobset": ["configmap.digits-run", "jobset.digits"],
    "trainjob": ["configmap.digits-run", "trainingruntime.digits", "trainjob.digits"],
}
"""What a job of each kind leaves in the cluster."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_checked_before_it_is_applied_and_cancelled_whole(
    kind: Kind, made: SubmittedJob, cluster: Cluster
) -> None:
    """Into an empty cluster, where a TrainJob's runtime has to be there before the server can check the job; nothing is
    left when the job is cancelled."""
    scheduler = Kubernetes(OPTIONS, kind)
    write_files(made, scheduler.files(made))
    submission = scheduler.submit(made)
    assert submission == Submission("kubernetes", "digits", {"namespace": "default", "kind": kind})
    assert cluster.objects() == KINDS[kind]
    applied = [call for call in cluster.calls() if "apply" in call]
    assert ["--dry-run=server" in call for call in applied] == [True, False] * (len(applied) // 2)
    scheduler.cancel(submission)
    assert cluster.objects() == []


def test_a_trainjob_that_is_refused_leaves_no_runtime(made: SubmittedJob, cluster: Cluster) -> None:
    """The server refuses the job, whose runtime is there already: both are gone, and the run can be submitted again."""
    scheduler = Kubernetes(OPTIONS, "trainjob")
    write_files(made, scheduler.files(made))
    manifest = made.job_files / "job.yaml"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"name": "digits"', '"name": "other"').replace("name: digits", "name: other"))
    assert manifest.read_text() != whole
    with pytest.raises(EnvironmentFault, match="must be created before the TrainJob"):
        scheduler.submit(made)
    assert cluster.objects() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_ended_starts_again_and_one_that_runs_is_left_alone(
    kind: Kind, made: SubmittedJob, cluster: Cluster
) -> None:
    """To apply what is there already changes nothing, so an ended job is deleted first; under one that runs, not even
    the run file changes; and what Shoal did not submit is nobody's to delete."""
    scheduler = Kubernetes(OPTIONS, kind)
    write_files(made, scheduler.files(made))
    scheduler.submit(made)
    before = cluster.get("configmap", "digits-run")
    longer = job("replicas", made.folder, restarts=3)
    write_files(longer, scheduler.files(longer))
    with pytest.raises(UsageError, match=r"has not ended: shoal submit cancel it first"):
        scheduler.submit(longer)
    assert cluster.get("configmap", "digits-run") == before
    for condition in ("Failed", "Completed" if kind == "jobset" else "Complete"):
        cluster.end(kind, "digits", condition)
        assert "status" in (cluster.get(kind, "digits") or {})
        scheduler.submit(longer)
        assert "status" not in (cluster.get(kind, "digits") or {"status": "gone"})
    theirs = cluster.get(kind, "digits")
    assert theirs is not None
    del theirs["metadata"]["labels"]
    cluster.put(theirs)
    with pytest.raises(UsageError, match="that Shoal did not submit"):
        scheduler.submit(longer)


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


def test_what_keeps_pods_from_starting_is_told(made: SubmittedJob, cluster: Cluster) -> None:
    """No host with room, and an image that is not there: each reason once, with the cluster's words; a pod that is
    about to start is none."""
    scheduler = Kubernetes(OPTIONS)
    write_files(made, scheduler.files(made))
    submission = scheduler.submit(made)
    assert scheduler.status(submission).sentence == "jobset digits waits until all of its pods have started"
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: too few GPUs"}
    for number, status in enumerate(
        [
            {"conditions": [full]},
            {"conditions": [full]},
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
        ]
    ):
        cluster.put({"kind": "Pod", "metadata": {"name": f"pod-{number}"}, "status": status})
    assert scheduler.status(submission).sentence == (
        "jobset digits waits until all of its pods have started; "
        "ImagePullBackOff (1 pod, such as pod-2: no such image); "
        "Unschedulable (2 pods, such as pod-0: 0/3 nodes: too few GPUs)"
    )


@pytest.mark.parametrize(
    ("name", "partition", "words"),
    [
        ("gpus", None, "hosts of at most 4 GPUs"),
        ("memory", None, "hosts of at most 31 GiB of memory"),
        ("memory", "big", None),
        ("replicas", None, "2 hosts in all"),
        ("replicas", "big", None),
    ],
)
def test_what_no_host_of_the_partition_has_is_refused(
    name: str, partition: str | None, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts, cores, memory and GPUs of the partition that is meant: the default one where none is named."""
    listed = "small*|2|48|32000+|gpu:a100:4(S:0-1)\nbig|9|128|512000|gpu:h100:8(S:0-1),license:2\n"
    if partition is not None:
        listed = listed.splitlines()[1] + "\n"  # as sinfo answers for a partition
    client(tmp_path, monkeypatch, "sinfo", out=listed)
    client(tmp_path, monkeypatch, "sbatch", out="17\n")
    scheduler, asked = Slurm(SlurmOptions(partition)), job(name, tmp_path)
    if words is None:
        assert scheduler.submit(asked).identity == "17"
        return
    with pytest.raises(EnvironmentFault, match=words):
        scheduler.submit(asked)


def test_an_array_is_told_task_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that wait share a line of scontrol's; the failed ones are named, and those it has forgotten counted."""
    shown = [
        "JobId=20 ArrayJobId=18 ArrayTaskId=4-6%2 JobState=PENDING Reason=Resources",
        "JobId=21 ArrayJobId=18 ArrayTaskId=1 JobState=FAILED ExitCode=2:0",
        "JobId=22 ArrayJobId=18 ArrayTaskId=2 JobState=RUNNING",
        "JobId=23 ArrayJobId=18 ArrayTaskId=3 JobState=COMPLETED",
    ]
    client(tmp_path, monkeypatch, "scontrol", out="\n".join(shown))
    submission = Submission("slurm", "18", {"tasks": "7"})
    found = Slurm().status(submission)
    assert found.state == "running"
    assert found.sentence == (
        "array 18 of 7 trials: 1 done, 1 running, 3 waiting, 1 failed, 1 forgotten by Slurm; the failed ones are 1"
    )
    logs = [tmp_path / "submit" / f"slurm-18_{task}.log" for task in (1, 2)]
    assert Slurm().log_command(submission, tmp_path) == []
    logs[0].parent.mkdir()
    for log in logs:
        log.write_text("")
    assert Slurm().log_command(submission, tmp_path) == ["tail", "-n", "+1", *map(str, logs)]


class Playing(Slurm):
    """A scheduler whose job goes through these states, and prints while it runs."""

    def __init__(self, states: list[State], log: Path) -> None:
        super().__init__()
        self._states, self._log = states, log

    def status(self, submission: Submission) -> Status:
        state = self._states.pop(0)
        if state != "waiting":
            self._log.write_text("step 1\n")
        return Status(state, f"the job is {state}")

    def log_command(self, submission: Submission, directory: Path) -> Sequence[str]:
        return ["tail", "-n", "+1", str(self._log)] if self._log.exists() else []


@pytest.mark.parametrize("last", ["done", "failed"])
@pytest.mark.parametrize("while_running", [["running", "running"], []])
def test_following_a_job_shows_it_to_its_end(
    last: State, while_running: list[State], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it waits for, once; what it prints, also where it ended between two looks; and how it ended."""
    told: list[str] = []
    scheduler = Playing(["waiting", "waiting", *while_running, last], tmp_path / "log")
    submission = Submission("slurm", "1")
    assert follow(scheduler, submission, tmp_path, say=told.append, look_s=0.0).state == last
    assert told[0] == "the job is waiting"
    assert told.count("the job is waiting") == 1
    if not while_running:
        assert capfd.readouterr().out == "step 1\n"


def test_a_job_that_is_gone_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm forgets jobs some minutes after their end, Kubernetes when they are deleted: no error, but said."""
    client(tmp_path, monkeypatch, "scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert Slurm().status(Submission("slurm", "12")).state == "unknown"
    client(tmp_path, monkeypatch, "kubectl")
    assert Kubernetes().status(SET).state == "unknown"


def test_kubernetes_without_an_image_is_refused(made: SubmittedJob) -> None:
    """Before anything is written."""
    with pytest.raises(UsageError, match="give --image and --volume"):
        Kubernetes().files(made)


def test_the_record_of_a_submission_comes_back(made: SubmittedJob) -> None:
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


def test_a_complaint_is_told_without_the_log_around_it() -> None:
    """As kubectl and sbatch really write where no cluster answers: one sentence of theirs is left; a client that only
    logs is told in its log's words."""

    def told(text: str) -> str:
        return said(subprocess.CompletedProcess(["x"], 1, "", text))

    log = 'E1124 00:19:54.578676   18892 memcache.go:265] "Unhandled Error" err="connect: connection refused"\n'
    complaint = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    assert told(f"{log}{log}{complaint}\n") == complaint
    assert told(log).startswith("E1124 ")
    error, fatal = "sbatch: error: fetch_config: DNS SRV lookup failed", "sbatch: fatal: Could not establish a source"
    assert told(f"{error}\n{error}\n{fatal}\n") == fatal
    assert told(f"{error}\n\nsbatch: error: no\n") == f"{error} sbatch: error: no"
