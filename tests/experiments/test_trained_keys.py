"""A trial that is over answers for the keys that it was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config.load import dumps
from shoal.errors import UsageError
from shoal.experiments.trial_command import require_trained_with
from shoal.runfile.load import load_run
from tests.cli.project import project


def test_other_keys_than_those_of_a_finished_trial_are_refused(tmp_path: Path) -> None:
    """A key that is new, one that is gone, and an edited run file; another layout and no key at all are fine."""
    run_file, folder = project(tmp_path).folder / "run.toml", tmp_path / "trial-0000"
    folder.mkdir()
    (folder / "run.toml").write_text(dumps(load_run(run_file, ["optimizer.lr=0.5", "run.processes=1"])))
    require_trained_with(run_file, ["optimizer.lr=0.5", "run.processes=2", "observe.live=false"], folder)
    require_trained_with(run_file, [], tmp_path / "trial-0001")
    for overrides, named in (([], "optimizer"), (["optimizer.lr=0.5", "run.steps=7"], "run.steps")):
        with pytest.raises(UsageError, match=f"was trained with another {named}, and is over"):
            require_trained_with(run_file, overrides, folder)
    run_file.write_text(run_file.read_text().replace("global_samples = 5", "global_samples = 6"))
    with pytest.raises(UsageError, match=r"another batch\.global_samples"):
        require_trained_with(run_file, ["optimizer.lr=0.5"], folder)
