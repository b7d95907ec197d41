"""Ranks over hosts, limits of time, variables: what a job is before any scheduler sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError, UsageError
from shoal.submit.job import divide, job_of, seconds_of, split_variables
from tests.submit.jobs import RUNS, job

WHOLE = st.integers(1, 64)


@given(WHOLE, WHOLE)
def test_hosts_times_ranks_are_all_ranks(hosts: int, each: int) -> None:
    """Whichever of the two is left out, it is found; both are kept."""
    world = hosts * each
    assert divide(world, nodes=hosts, ranks_per_node=each) == (hosts, each)
    assert divide(world, nodes=hosts, ranks_per_node=None) == (hosts, each)
    assert divide(world, nodes=None, ranks_per_node=each) == (hosts, each)
    assert divide(world, nodes=None, ranks_per_node=None) == (1, world)


def test_ranks_that_do_not_divide_are_refused_with_what_would() -> None:
    """Seven ranks on two hosts; hosts that would do are listed."""
    with pytest.raises(UsageError, match=r"7 ranks are not 2 hosts of 3: .* give --nodes 1, 7, or"):
        divide(7, nodes=2, ranks_per_node=None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-00", 86_400), ("1-12:30", 131_400), ("2-01:02:03", 176_523)],
)
def test_times_are_those_of_slurm(text: str, seconds: int) -> None:
    """Minutes, minutes:seconds, hours:minutes:seconds, days-hours and on."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1h", "1:2:3:4", "-5", "1-", "٣"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """A sentence that shows how times are written."""
    with pytest.raises(UsageError, match="is no time: write minutes"):
        seconds_of(text)


def test_a_limit_shorter_than_saving_is_refused() -> None:
    """Nothing would be left to train in."""
    made = job("limit")
    with pytest.raises(UsageError, match="leaves nothing to train in"):
        job_of(made.run_file, replace(made.resources, time_s=300), file="x", folder=made.folder)


def test_a_layout_that_cannot_be_is_refused_before_it_is_written() -> None:
    """Three ranks of a layout of two: as `shoal train` would."""
    made = job("tensor")
    with pytest.raises(LayoutError, match="3"):
        job_of(made.run_file, replace(made.resources, nodes=3, ranks_per_node=1), file="x", folder=made.folder)


def test_secrets_are_names_and_values_are_variables() -> None:
    """`NAME=value`, `NAME` from this environment, and names that sound secret, whose value is nowhere; the job's token
    is named by its file."""
    environ = {"HOME": "/h", "HF_TOKEN": "hunter2", "AZURE_STORAGE_KEY": "hunter3", "DB": "postgres://me:hunter4@h/d"}
    given = ["A=b=c", "HOME", "HF_TOKEN", "AZURE_STORAGE_KEY", "DB", "TOKENIZERS_PARALLELISM=false"]
    variables, secrets = split_variables(given, environ)
    plain = {"A": "b=c", "HOME": "/h", "TOKENIZERS_PARALLELISM": "false"}
    assert variables == plain | {"SHOAL_RECORD": "A,HOME,TOKENIZERS_PARALLELISM"}
    assert secrets == ("HF_TOKEN", "AZURE_STORAGE_KEY", "DB")
    assert split_variables(["SHOAL_JOB_TOKEN=/home/me/token"], {}) == ({"SHOAL_JOB_TOKEN": "/home/me/token"}, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("HF_TOKEN=x", "would write a secret"),
        ("OPENAI_KEY=x", "would write a secret"),
        ("ssh_passphrase=x", "would write a secret"),
        ("1A=b", "names no variable"),
        ("A b=c", "names no variable"),
        ("ABSENT", "is not set here"),
        ("A=b\nrm", "control character"),
    ],
)
def test_variables_that_a_job_file_must_not_hold_are_refused(text: str, words: str) -> None:
    """Secrets with their value, names that no shell knows, values with lines."""
    with pytest.raises(UsageError, match=words):
        split_variables([text], {})


def test_the_twelve_run_files_make_jobs_of_all_their_ranks() -> None:
    """Hosts times ranks is the run file's number of processes."""
    for name in RUNS:
        made = job(name)
        assert made.resources.world_size == made.run_file.run.processes, name
