"""`checkpoint.remote` and `checkpoint.every = "auto"` in runs of two ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from shoal.checkpoint.commit import checkpoints
from tests.cli.project import project

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from tests.checkpoint.s3_server import s3_server


@pytest.mark.slow
def test_a_run_goes_on_in_an_empty_directory(tmp_path: Path) -> None:
    """Its disk is lost after step 6: the next start fetches that checkpoint, and no step is taken twice."""
    own = project(tmp_path)
    with s3_server() as server:
        options = (
            "checkpoint.every_steps=3",
            'checkpoint.remote="s3://copies/own"',
            f'checkpoint.remote_options={{endpoint_url="{server.url}", key="test", secret="test"}}',
        )
        done = own.shoal("train", "run.toml", "run.steps=6", *options)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(tmp_path / "runs")
        done = own.shoal("train", "run.toml", *options)
        assert done.returncode == 0, done.stderr
    assert "fetched the checkpoint of step 6 from s3://copies/own" in done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "used.jsonl").read_text().splitlines()]
    used = Counter(dict.fromkeys(range(1, 10), 0))
    for line in lines:
        used[line["step"]] += len(line["ids"])
    assert used == dict.fromkeys(range(1, 10), 5)


@pytest.mark.slow
def test_the_interval_follows_the_failures(tmp_path: Path) -> None:
    """A failure every 100 days is expected: after the first save, none is due before the last step."""
    own = project(tmp_path)
    auto = ('checkpoint.every="auto"', "checkpoint.every_steps=2", "checkpoint.expected_failure_s=8640000")
    done = own.shoal("train", "run.toml", *auto)
    assert done.returncode == 0, done.stderr
    assert re.search(r"the next checkpoint is due after \d+ steps", done.stdout + done.stderr)
    assert len(checkpoints(tmp_path / "runs/own")) == 2
