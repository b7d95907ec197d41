"""The batch script, by running it: `srun` and `scontrol` are programs that write down how they were called."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.submit.slurm import SlurmOptions, batch_script
from tests.submit.jobs import RUNS, job

NEAT = sorted(set(RUNS) - {"quoted"})


def header(text: str) -> dict[str, str]:
    """The options in the lines of #SBATCH."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def run(text: str, folder: Path, *, code: int, restarts: int = 0) -> tuple[int, list[str]]:
    """The script's exit code where srun ends with `code`, and what it called."""
    for program in ("srun", "scontrol", "sleep"):
        body = f'#!/bin/sh\necho {program} "$@" >> {folder}/calls\nexit {code if program == "srun" else 0}\n'
        (folder / program).write_text(body)
        (folder / program).chmod(0o755)
    (folder / "calls").write_text("")
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("name", NEAT)
def test_the_header_asks_for_what_the_job_needs(name: str) -> None:
    """Hosts, a task on each with the cores of all its ranks, and GPUs, memory and time only where they were given."""
    made = job(name)
    found, asked = header(batch_script(made, SlurmOptions())), made.resources
    assert found["nodes"] == str(asked.nodes)
    assert found["ntasks-per-node"] == "1"
    assert found["cpus-per-task"] == str(asked.cpus_per_node)
    assert found.get("gpus-per-node") == (str(asked.gpus_per_node) if asked.gpus_per_node else None)
    assert found.get("mem") == (f"{asked.memory_gib}G" if asked.memory_gib else None)
    assert ("time" in found) == ("signal" in found) == (asked.time_s is not None)
    assert "requeue" in found
    assert not {"partition", "account", "qos", "constraint"} & set(found)


def test_limits_and_places_are_slurms_own_words(tmp_path: Path) -> None:
    """A day with five minutes to save; partition, account, quality of service, features."""
    found = header(batch_script(job("limit"), SlurmOptions("gpu", "physics", "long", "a100")))
    assert (found["time"], found["signal"]) == ("1-00:00:00", "TERM@300")
    assert [found[name] for name in ("partition", "account", "qos", "constraint")] == ["gpu", "physics", "long", "a100"]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 6, 137])
def test_other_codes_are_the_jobs_own(code: int, tmp_path: Path) -> None:
    """The script ends with them and asks for nothing."""
    ended, calls = run(batch_script(job("replicas"), SlurmOptions()), tmp_path, code=code)
    assert ended == code
    assert [call.split()[0] for call in calls] == ["srun"]


def test_75_asks_for_a_requeue_until_restarts_are_used_up(tmp_path: Path) -> None:
    """Once for job 7; and not any more when it has started again as often as allowed."""
    text = batch_script(job("replicas", restarts=3), SlurmOptions())
    assert run(text, tmp_path, code=75, restarts=2)[1][1] == "scontrol requeue 7"
    ended, calls = run(text, tmp_path, code=75, restarts=3)
    assert (ended, len(calls)) == (75, 1)


def test_values_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    """Blanks, quotes and dollars in variables, and in the interpreter's path, are no shell's business."""
    odd = "a b 'c' \"$HOME\" `id`"
    text = batch_script(job("replicas", variables={"ODD": odd}, python="/opt/my python"), SlurmOptions())
    (tmp_path / "srun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$ODD" "$@" > {tmp_path}/seen\n')
    (tmp_path / "srun").chmod(0o755)
    subprocess.run(["bash", "-c", text], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[0] == odd
    assert "/opt/my python" in seen


def test_a_header_that_slurm_would_misread_is_refused() -> None:
    """Blanks and quotes in the run's folder."""
    with pytest.raises(UsageError, match="cannot hold blanks, quotes or %"):
        batch_script(job("quoted"), SlurmOptions())
