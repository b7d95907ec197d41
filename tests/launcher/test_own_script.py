"""A script that is run again for its data alone: up to its call of Shoal for this run, whatever the data is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shoal.errors import UserCodeError
from shoal.launcher.own_script import READS_FOR, data_given

SCRIPT = """
import sys
import shoal
import torch


class Samples:
    def __init__(self, scale):
        self.scaled = lambda i: i * scale  # which cannot be pickled

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return [float(self.scaled(i))]


def main():
    model = torch.nn.Linear(1, 1)
    config = {"run": {"steps": 1}, "batch": {"global_samples": 1}}
    try:
        shoal.train({**config, "run": {"name": "first", "steps": 1}}, model=model, data=Samples(1))
        CALL
    except Exception:
        print("scripts catch what goes wrong")
    open("beyond", "w")


if __name__ == "__main__":
    main()
"""
TRAIN = 'shoal.train(config, ["run.name=\\"mine\\""], model=model, data=Samples(int(sys.argv[1])))'
START = """shoal.start(
            {"run": {"name": "mine"}}, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=Samples(int(sys.argv[1])), batch_samples=1, steps=1,
        )"""


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, the folder, and the variables as they were."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv(READS_FOR, "")
    monkeypatch.chdir(tmp_path)


def command(call: str) -> list[str]:
    Path("mine.py").write_text(SCRIPT.replace("CALL", call))
    return [sys.executable, str(Path("mine.py").resolve()), "7"]


@pytest.mark.slow
@pytest.mark.parametrize("call", [TRAIN, START], ids=["train", "start"])
def test_the_data_of_the_call_for_this_run(call: str) -> None:
    """Not that of the first call; objects of the script's own classes; and nothing behind the call is run."""
    given = data_given(command(call), Path("runs/mine"), os.environ)
    source = given[0].source if isinstance(given, tuple) else given
    assert len(source) == 5
    assert source[3] == [21.0]
    assert not Path("beyond").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("call", "sentence"), [("pass", "came to its end without the call"), ("sys.exit(3)", "ended with exit code 3 w")]
)
def test_a_script_without_the_call(call: str, sentence: str) -> None:
    with pytest.raises(UserCodeError, match=sentence):
        data_given(command(call), Path("runs/mine"), os.environ)
