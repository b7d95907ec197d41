"""Manifests for Kubernetes: against the published schemas, and as what they start."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.data.config import Tokens
from shoal.data.order import Order
from shoal.errors import UsageError
from shoal.runfile.load import load_run
from shoal.submit import kubernetes
from shoal.submit.job import Resources, SubmittedJob, job_of
from shoal.submit.pods import (
    QUEUE_LABEL,
    RUN_FILE,
    RUN_FOLDER,
    RUNS,
    KubernetesOptions,
    jobset,
    node_selector_of,
    trainjob,
)
from tests.cli.project import Project, project
from tests.ports import free_port
from tests.submit.jobs import RECIPES, job
from tests.submit.jobs import RUNS as RUN_FILES
from tests.submit.structural import faults
from tests.waiting import HANG_S

OPTIONS = KubernetesOptions(
    "registry.site/shoal:0.1",
    "runs",
    queue="team",
    spot=("cloud/spot=true", "cloud/cheap"),
    workdir="/runs/code",
    node_selector=(("cloud/pool", "spot"),),
)
WRITERS = {"jobset": jobset, "trainjob": trainjob}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that is no container."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("name", RUN_FILES)
def test_manifests_of_twelve_run_files_are_valid(name: str, writer: Callable[..., list[dict[str, Any]]]) -> None:
    """Every object that is no ConfigMap satisfies the published schema, with no field unknown to it."""
    objects = writer(job(name), OPTIONS)
    assert objects[0]["kind"] == "ConfigMap"
    assert [fault for found in objects[1:] for fault in faults(found)] == []


@pytest.mark.slow
def test_what_pods_request_follows_from_the_plan(tmp_path: Path) -> None:
    """`--cluster`: GPUs, and a core for each of the threads that train and read, in a manifest that is valid; what is
    asked for on the command line stands. A layout that no device holds is refused, with keys that would fit."""
    reader = pytest.importorskip("yaml", reason="PyYAML reads the manifests back")
    (tmp_path / "dgx.toml").write_text('[cluster]\nmachine = "dgx-h100"\nnodes = 4\ndevices_per_node = 8\n')
    run_file = str(RECIPES / "stdlib-gpt.toml")
    where = ("--to", "kubernetes", "--image", "i", "--volume", "v", "--workdir", "/runs/code", "--dry-run", "--json")
    base = ("submit", run_file, *where, "--cluster", "dgx.toml", "run.device=cuda", "data.readers=3")

    def requests(*more: str) -> dict[str, str]:
        done = Project(tmp_path).here(*base, "run.processes=16", *more)
        assert done.returncode == 0, done.stderr
        _, found = reader.safe_load_all(json.loads(done.stdout)["files"]["job.yaml"])
        assert faults(found) == []
        pods = found["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert pods["completions"] == 2
        return pods["template"]["spec"]["containers"][0]["resources"]["requests"]

    assert requests() == {"cpu": "32", "nvidia.com/gpu": "8"}
    assert requests("--cpus", "2", "--memory", "64") == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "8"}
    large = ("model.width=8192", "model.layers=40", "model.heads=64", "batch.sequence=4096", "batch.global_samples=64")
    refused = Project(tmp_path).here(*base, "run.processes=32", *large)
    assert refused.returncode == 3
    assert "would fit; shoal plan RUN.toml --cluster dgx.toml shows more" in refused.stderr


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_every_renamed_field_is_refused(writer: Callable[..., list[dict[str, Any]]]) -> None:
    """A misspelt key anywhere on the way to a value of the specification is an unknown field; labels, names of
    resources and the object's own metadata are free."""
    tried = 0
    for found in writer(job("gpus"), OPTIONS)[1:]:
        for path in leaves(found["spec"]):
            last = max(index for index, key in enumerate(path) if isinstance(key, str))
            if path[last - 1] in ("labels", "requests", "limits", "nodeSelector"):
                continue
            mutated = copy.deepcopy(found)
            holder = at(mutated["spec"], path[:last])
            holder[path[last] + "x"] = holder.pop(path[last])
            assert any("unknown field" in fault for fault in faults(mutated)), path
            tried += 1
    assert tried > 60


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("failurePolicy", "rules", 0, "action"), "Restart"),
        (("failurePolicy", "maxRestarts"), "many"),
        (("replicatedJobs", 0, "replicas"), -1),
        (("replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "name"), None),
        (("network", "enableDNSHostnames"), "yes"),
    ],
)
def test_wrong_values_are_refused(path: tuple[Any, ...], value: Any) -> None:
    """A word outside an enumeration, a text for a number, a number below its bound."""
    found = jobset(job("replicas"), OPTIONS)[1]
    at(found["spec"], path[:-1])[path[-1]] = value
    assert faults(found)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_75_starts_again_and_2_does_not(writer: Callable[..., list[dict[str, Any]]]) -> None:
    """Kubernetes' messages for exit codes run through both policies: 75 and evictions start again without being
    counted, 2, 4 and 6 fail the set, and what no rule of the SubmittedJob names starts again, counted."""
    found = writer(job("replicas", restarts=7), OPTIONS)[1]
    spec = found["spec"]["template"]["spec"] if found["kind"] == "TrainingRuntime" else found["spec"]
    pods, policy = spec["replicatedJobs"][0]["template"]["spec"], spec["failurePolicy"]
    assert pods["backoffLimit"] == 0
    assert pods["template"]["spec"]["restartPolicy"] == "Never"

    def answer(code: int | None) -> str:
        for index, rule in enumerate(pods["podFailurePolicy"]["rules"]):
            if code is None and "onPodConditions" in rule:
                message = f"Pod default/x has condition DisruptionTarget matching FailJob rule at index {index}"
            elif code in rule.get("onExitCodes", {}).get("values", ()):
                why = f"failed with exit code {code} matching FailJob rule at index {index}"
                message = f"Container node for pod default/x {why}"
            else:
                continue
            for wanted in policy["rules"]:
                patterns = wanted.get("onJobFailureMessagePatterns", [""])
                if any(pattern in message for pattern in patterns):
                    return wanted["action"]
        return "RestartJobSet"  # BackoffLimitExceeded

    assert {code: answer(code) for code in (75, None, 2, 4, 6, 1, 3, 5, 137)} == {
        75: "RestartJobSetAndIgnoreMaxRestarts",
        None: "RestartJobSetAndIgnoreMaxRestarts",
        2: "FailJobSet",
        4: "FailJobSet",
        6: "FailJobSet",
        1: "RestartJobSet",
        3: "RestartJobSet",
        5: "RestartJobSet",
        137: "RestartJobSet",
    }
    assert policy["maxRestarts"] == 7


def test_the_queue_stands_on_what_kueue_admits() -> None:
    """On the JobSet, or on the TrainJob but not on its runtime, which is only a template."""
    assert jobset(job("replicas"), OPTIONS)[1]["metadata"]["labels"][QUEUE_LABEL] == "team"
    _, runtime, train = trainjob(job("replicas"), OPTIONS)
    assert QUEUE_LABEL not in runtime["metadata"]["labels"]
    assert train["metadata"]["labels"][QUEUE_LABEL] == "team"


def test_a_secret_is_a_reference_and_needs_a_name() -> None:
    """The value of a secret is in no object; without the name of a Secret the job is refused."""
    made = job("replicas", secrets=("HF_TOKEN",), variables={"HF_HOME": "/runs/hf"})
    with pytest.raises(UsageError, match="--secret NAME"):
        jobset(made, OPTIONS)
    options = KubernetesOptions("x", "runs", secret="tokens")
    container = jobset(made, options)[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    variables = {entry["name"]: entry for entry in container["containers"][0]["env"]}
    assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "tokens", "key": "HF_TOKEN"}}
    assert variables["HF_HOME"]["value"] == "/runs/hf"


@pytest.mark.parametrize("name", ["0own", "-", "a" * 41])
def test_names_that_kubernetes_cannot_hold_are_refused(name: str, tmp_path: Path) -> None:
    """Too long, or without a letter to begin with; refused before anything is written."""
    (tmp_path / "run.toml").write_text((project(tmp_path).folder / "run.toml").read_text())
    own = load_run(tmp_path / "run.toml")
    made = job_of(own, Resources(1, 2), file="run.toml", folder=tmp_path)
    renamed = msgspec.structs.replace(own, run=msgspec.structs.replace(made.run_file.run, name=name))
    with pytest.raises(UsageError, match=r"makes no name for Kubernetes"):
        jobset(SubmittedJob(renamed, made.resources, tmp_path), OPTIONS)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("name", ["gpus", "quoted", "limit"])
def test_yaml_reads_back_as_what_was_written(name: str, writer: Callable[..., list[dict[str, Any]]]) -> None:
    """By PyYAML: every object, every text, and the run file with its quotes and lines."""
    reader = pytest.importorskip("yaml", reason="PyYAML reads the manifests back")
    objects = writer(job(name, variables={"A": "a: b # c", "B": "true", "C": "", "D": "1e3", "E": "- x"}), OPTIONS)
    assert list(reader.safe_load_all(kubernetes.documents(objects))) == json.loads(json.dumps(objects))


def test_what_lies_beside_the_run_file_needs_a_workdir(tmp_path: Path) -> None:
    """A module of the user's or a file of data in the folder of the run file: pods have neither, so the job is refused
    with what and where; a module that is installed is the image's, and a file by its absolute path the volume's."""
    bare = KubernetesOptions("image:1", "runs")
    jobset(job("replicas"), bare)
    project(tmp_path)
    made = job_of(load_run(tmp_path / "run.toml"), Resources(2, 1), file="run.toml", folder=tmp_path)
    with pytest.raises(UsageError, match=r"model\.build needs own\.py, .* give its folder there with --workdir"):
        jobset(made, bare)
    elsewhere = job_of(load_run(tmp_path / "run.toml"), Resources(2, 1), file="run.toml", folder=tmp_path / "runs")
    jobset(elsewhere, bare)
    (tmp_path / "tokens.bin").write_bytes(bytes(64))
    with_data = msgspec.structs.replace(load_run(RECIPES / "stdlib-gpt.toml"), data=Tokens(path="tokens.bin"))
    made = job_of(with_data, Resources(1, 2), file="run.toml", folder=tmp_path)
    with pytest.raises(UsageError, match=r"data needs tokens\.bin"):
        jobset(made, bare)
    with pytest.raises(UsageError, match="is no absolute path"):
        jobset(made, KubernetesOptions("image:1", "runs", workdir="code"))


def test_hosts_of_a_pool_are_selected_by_label() -> None:
    """A toleration alone lets pods onto spot hosts and onto others; a label keeps them there."""
    pods = jobset(job("replicas"), OPTIONS)[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pods["nodeSelector"] == {"cloud/pool": "spot"}
    assert node_selector_of(["a/b=c=d", "e="]) == (("a/b", "c=d"), ("e", ""))
    with pytest.raises(UsageError, match="is no label: write NAME=VALUE"):
        node_selector_of(["pool"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", pytest.param("trainjob", marks=pytest.mark.stress)])
def test_what_pods_start_trains(kind: str, tmp_path: Path) -> None:
    """The commands of both pods, as processes with the pods' variables in the pods' working folder, train to the end,
    and their token lies on the volume for their user alone. The pods' folders are folders here, and the name that the
    headless service gives to pod 0 is this host's; for a TrainJob, Trainer adds the variables that its `torch` policy
    sets."""
    own = project(tmp_path)
    made = job_of(load_run(tmp_path / "run.toml"), Resources(2, 1), file="run.toml", folder=tmp_path)
    config, found, *train = WRITERS[kind](made, OPTIONS)
    for name in (RUNS, RUN_FOLDER):
        (tmp_path / name.lstrip("/")).mkdir(parents=True)
    code = tmp_path / "runs/code"
    code.mkdir()
    (tmp_path / "own.py").rename(code / "own.py")

    def here(text: str) -> str:
        for name in (RUNS, RUN_FOLDER):
            text = text.replace(f"{name}/", f"{tmp_path}{name}/")
        return text

    (tmp_path / RUN_FOLDER.lstrip("/") / RUN_FILE).write_text(here(config["data"][RUN_FILE]))
    spec = found["spec"]["template"]["spec"] if train else found["spec"]
    pods = spec["replicatedJobs"][0]["template"]["spec"]
    container = pods["template"]["spec"]["containers"][0]
    port, running = free_port(), []
    for index in range(pods["completions"]):
        given = {entry["name"]: entry.get("value", str(index)) for entry in container["env"]}
        if train:
            asked = train[0]["spec"]["trainer"]
            given |= {"PET_NNODES": str(asked["numNodes"]), "PET_NPROC_PER_NODE": str(asked["numProcPerNode"])}
            given |= {"PET_NODE_RANK": str(index)}
        else:
            assert given["PET_MASTER_ADDR"] == "own-hosts-0-0.own"
        given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        python, *arguments = container["command"]
        assert python == "python3"
        running.append(
            subprocess.Popen(
                [sys.executable, *map(here, arguments)],
                cwd=here(container["workingDir"] + "/"), env=own.environ(**given), stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    ends = [(pod.communicate(timeout=HANG_S)[1], pod.returncode) for pod in running]
    assert [code for _, code in ends] == [0, 0], ends
    lines = [json.loads(line) for line in (code / "used.jsonl").read_text().splitlines()]
    used = [i for line in sorted(lines, key=lambda line: (line["step"], line["rank"])) for i in line["ids"]]
    assert used == Order(30, seed=0).ids(np.arange(45)).tolist()
    assert (tmp_path / "runs/own/checkpoints/latest").exists()
    assert os.path.exists(tmp_path / "runs/own/logs/rank-00001.log")
    assert (tmp_path / "runs/own/token").stat().st_mode & 0o777 == 0o600
    # Else a second start would find the token open to the pods' group, and refuse it.
    assert pods["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
