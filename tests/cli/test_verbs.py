"""The other verbs, other launchers, and the door from Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.project import Project, project
from tests.ports import free_port
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Project:
    """A finished run of nine steps on two ranks, with its report."""
    own = project(tmp_path_factory.mktemp("trained"))
    done = own.shoal("train", "run.toml", "observe.report=true")
    assert done.returncode == 0, done.stderr
    return own


def test_a_run_directory_holds_what_the_contract_lists(trained: Project) -> None:
    """Resolved file, events and logs of every rank, checkpoints with a latest, report and picture."""
    run = trained.folder / "runs/own"
    for name in (
        "run.toml",
        "events/rank-00000.jsonl",
        "events/rank-00001.jsonl",
        "logs/rank-00000.log",
        "logs/rank-00001.log",
        "checkpoints/step-00000009/manifest.json",
        "checkpoints/latest",
        "report.html",
    ):
        assert (run / name).exists(), name
    names = {name for event in trained.events() for name in event.values}
    assert {"loss/train", "loss/eval", "accuracy/eval", "lr", "grad/norm", "samples/consumed", "time/step", "time/data",
            "time/forward_backward", "time/sync_exposed", "time/optimizer", "time/checkpoint_stall", "wire/bytes_sent",
            "memory/peak_bytes", "throughput/samples_per_second", "checkpoint/interval_s"} <= names  # fmt: skip
    apart = [event.get("checkpoint/interval_steps") for event in trained.events() if event.get("time/step") is not None]
    assert apart == [None, *[1] * 8]


@pytest.mark.slow
def test_training_from_the_resolved_file_is_the_same_run(trained: Project) -> None:
    """`runs/own/run.toml` trains to the same losses."""
    done = trained.shoal("train", "runs/own/run.toml", "run.directory=again")
    assert done.returncode == 0, done.stderr
    assert trained.losses("again") == trained.losses()


@pytest.mark.slow
def test_evaluate_gives_what_training_gave(trained: Project) -> None:
    """On one rank and on two, the last evaluation of the run comes out again; --json prints one object."""
    want = next(e.get("loss/eval") for e in reversed(trained.events()) if e.get("loss/eval") is not None)
    for processes in (1, 2):
        done = trained.shoal("evaluate", "runs/own", f"run.processes={processes}", "--json")
        assert done.returncode == 0, done.stderr
        values = json.loads(done.stdout)
        assert values["loss/eval"] == pytest.approx(want, rel=1e-6)
        assert values["step"] == 9
        assert "evaluating" in done.stderr


@pytest.mark.slow
def test_verify_says_how_far_it_is(trained: Project) -> None:
    """Each step is announced on standard error before it is computed; standard output is one JSON object."""
    done = trained.shoal("verify", "run.toml", "run.processes=2", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["holds"] is True
    announced = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert [line[:11] for line in announced] == ["step 1 of 2", "step 1 of 2", "step 2 of 2", "step 2 of 2"]


@pytest.mark.slow
def test_checkpoints_are_listed_and_a_flipped_bit_is_named(trained: Project) -> None:
    """`ls` shows every step; `verify` reads them and exits 0; after one changed byte it names file and step, exit 6."""
    listed = json.loads(trained.shoal("checkpoint", "ls", "runs/own", "--json").stdout)["checkpoints"]
    assert [row["step"] for row in listed] == list(range(9, 0, -1))
    assert trained.shoal("checkpoint", "verify", "runs/own").returncode == 0
    shutil.copytree(trained.folder / "runs/own", trained.folder / "damaged")
    name = next(iter(trained.manifest("damaged")["objects"]))
    path = trained.folder / f"damaged/checkpoints/objects/{name}.safetensors"
    original = path.read_bytes()
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    found = trained.shoal("checkpoint", "verify", "damaged", "--step", "9")
    assert found.returncode == 6
    assert name in found.stdout
    resumed = trained.shoal("train", "run.toml", "run.directory=damaged", "run.steps=10")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from the checkpoint of step 8" in resumed.stdout
    assert name in resumed.stdout + resumed.stderr


@pytest.mark.slow
def test_weights_alone_start_another_run(trained: Project) -> None:
    """`run.warm_start` takes a run directory or a checkpoint; the new run begins at step 1 with a lower loss."""
    for source in ("runs/own", "runs/own/checkpoints/step-00000005"):
        done = trained.shoal(
            "train",
            "run.toml",
            f"run.warm_start={source}",
            "run.directory=warm",
            "run.steps=1",
            "batch.global_samples=30",
        )
        assert done.returncode == 0, done.stderr
        assert f"of {source}" in done.stdout
        shutil.rmtree(trained.folder / "warm")


def test_the_report_can_be_written_again(trained: Project) -> None:
    """`shoal report` on a run directory; a folder without a run is refused."""
    assert trained.shoal("report", "runs/own").returncode == 0
    assert (trained.folder / "runs/own/loss.png").exists()
    assert trained.shoal("report", "cache").returncode == 2


def test_a_run_tells_what_its_first_step_did(trained: Project) -> None:
    """The operations of a step of rank 0, and that nobody knows this device's peak: so there is no MFU."""
    facts = json.loads((trained.folder / "runs/own/facts.json").read_text())
    assert facts["device_use"]["flops_of_step"] > 0
    assert (facts["device_use"]["peak_flops"], facts["attention"]) == (None, [])
    assert "set observe.peak_tflops" in facts["device_use"]["peak_from"]


@pytest.mark.slow
def test_mfu_is_measured_where_the_peak_is_said(trained: Project) -> None:
    """In every step but the one that was looked at, on every rank, and in the last line."""
    done = trained.shoal("train", "run.toml", "run.directory=peak", "run.steps=3", "observe.peak_tflops=0.001")
    assert done.returncode == 0, done.stderr
    (folder,) = (path.parent for path in (trained.folder / "peak").rglob("facts.json"))
    for rank in range(2):
        lines = map(json.loads, (folder / f"events/rank-{rank:05d}.jsonl").read_text().splitlines())
        steps = {line["step"]: line["values"] for line in lines if "time/step" in line["values"]}
        assert [step for step, values in steps.items() if "throughput/mfu" in values] == [2, 3]
        assert all(values["throughput/mfu"] == values["throughput/hfu"] > 0 for values in [steps[2], steps[3]])
    assert "MFU" in done.stdout
    shutil.rmtree(trained.folder / "peak")


@pytest.mark.slow
def test_doctor_finds_a_repair_for_each_finding(trained: Project) -> None:
    """Every finding that is not ok names its repair; --json holds the same."""
    done = trained.shoal("doctor", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert {"ok", "warning", "problem"} >= {finding["status"] for finding in findings}
    assert all(finding["repair"] for finding in findings if finding["status"] != "ok")
    assert any("torch" in finding["name"].lower() for finding in findings)


@pytest.mark.parametrize(
    "verb", [[], ["train"], ["evaluate"], ["report"], ["doctor"], ["checkpoint", "ls"], ["bench", "step"]]
)
def test_help_shows_an_example_and_loads_no_torch(trained: Project, verb: list[str]) -> None:
    """`--help` answers without importing torch."""
    code = "import sys\nfrom shoal.cli.main import app\ntry: app(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *verb, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
    assert not verb or "Example: shoal" in done.stdout


@pytest.mark.slow
def test_torchrun_starts_the_same_run(trained: Project) -> None:
    """Under torchrun the processes are ranks, and the losses are the same bits."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal", "train",
         "run.toml", "run.directory=torchrun"],
        cwd=trained.folder, env=trained.environ(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert trained.losses("torchrun") == trained.losses()


@pytest.mark.slow
def test_srun_variables_make_ranks_of_several_nodes(trained: Project) -> None:
    """Two processes with Slurm's variables, as two nodes of one task each, train the same run."""
    port = free_port()
    ranks = []
    for node in range(2):
        variables = {
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(node),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(node),
            "SLURM_TASKS_PER_NODE": "1(x2)",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = ("train", "run.toml", "run.directory=srun")
        ranks.append(trained.start(*command, output=f"task-{node}.txt", **variables))
    assert [rank.wait(HANG_S) for rank in ranks] == [0, 0], trained.said("task-0.txt")
    assert trained.losses("srun") == trained.losses()


SCRIPT = """
import shoal
from own import Logging, Numbers

for name, steps in (("first", 3), ("second", 5)):
    config = {"run": {"name": name, "steps": steps}, "batch": {"global_samples": 6}, "observe": {"report": False}}
    folder = shoal.train(config, ["optimizer.lr=0.01"], model=Logging, data=(Numbers(), Numbers()))
    print("trained into", folder)
"""


@pytest.mark.slow
def test_a_script_trains_its_own_objects_and_goes_on_once(trained: Project) -> None:
    """Each `shoal.train` of a script starts two ranks; what follows runs in the starting process alone."""
    (trained.folder / "script.py").write_text(SCRIPT)
    done = trained.python("script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained into runs/second") == 1
    assert sorted(trained.losses("runs/first")) == [1, 2, 3]
    assert sorted(trained.losses("runs/second")) == [1, 2, 3, 4, 5]
    assert len(list((trained.folder / "runs/second/events").iterdir())) == 2
    evaluated = trained.shoal("evaluate", "runs/second")
    assert evaluated.returncode == 2
    assert "were objects of a script" in evaluated.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system that is full is mounted for this, which takes root")
def test_a_full_disk_stops_no_training(tmp_path: Path) -> None:
    """Checkpoints that do not fit: the run goes on and says so, and ends with code 3, as its last step is not saved."""
    own = project(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], check=True)
    try:
        done = own.shoal("train", "run.toml", f"run.directory={disk}/run", "model.arguments={width=20000}")
        assert done.returncode == 3, done.stderr
        assert "No space left" in done.stdout + done.stderr
        assert sorted(own.losses(f"{disk}/run")) == list(range(1, 10))
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)
