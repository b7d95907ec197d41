"""What a verb is to write, and the lists of numbers it takes, are refused before it works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from shoal.bench.options import numbers, token_counts
from shoal.checkpoint.weights import save_weights
from shoal.cli.arguments import output_file, picture_file
from shoal.cli.doctor import print_findings
from shoal.cli.main import app
from shoal.errors import EnvironmentFault
from shoal.launcher.doctor import Finding


def test_a_file_in_a_folder_that_is_there_is_taken(tmp_path: Path) -> None:
    assert output_file(tmp_path / "a.json") == tmp_path / "a.json"
    assert picture_file(tmp_path / "a.SVG") == tmp_path / "a.SVG"
    assert output_file(None) is None
    assert picture_file(None) is None


def test_a_missing_folder_a_folder_and_another_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no folder"):
        output_file(tmp_path / "none" / "a.json")
    with pytest.raises(typer.BadParameter, match="is a folder"):
        output_file(tmp_path)
    with pytest.raises(typer.BadParameter, match=r"\.png"):
        picture_file(tmp_path / "a.xyz")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the work that was to be written there; asked of the file where there is one, else of its folder."""
    (tmp_path / "old.json").touch()
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path) or mode != os.W_OK)
    for name in ("new.json", "old.json"):
        with pytest.raises(EnvironmentFault, match=f"{name} cannot be written there: make .* writable"):
            output_file(tmp_path / name)
    assert asked == [tmp_path, tmp_path / "old.json"]


def test_numbers_are_read_whole_or_refused() -> None:
    assert numbers("4, 8,16", "--batches", least=4, multiple_of=4) == [4, 8, 16]
    for text in ("4,x,16", "", "-4", "4.5", "0", "6"):
        with pytest.raises(typer.BadParameter, match="give multiples of 4 from 4"):
            numbers(text, "--batches", least=4, multiple_of=4)
    with pytest.raises(typer.BadParameter, match="multiples of 128"):
        token_counts("256,100")


def test_a_difference_of_checkpoints_is_said_in_words(tmp_path: Path) -> None:
    """What is other, of which type and shape, and by how much."""
    one = {"a": torch.zeros(2), "b": torch.ones(3), "c": torch.zeros(1)}
    two = {"a": torch.zeros(4), "b": torch.tensor([1.0, 1.5, 1.0])}
    for name, weights in (("one", one), ("two", two)):
        save_weights(weights, tmp_path, tmp_path / name)
    done = CliRunner().invoke(app, ["checkpoint", "diff", str(tmp_path / "one"), str(tmp_path / "two")])
    assert done.exit_code == 6
    assert done.output.splitlines()[1:] == [
        "  model/a: shape (float32 [2] and float32 [4])",
        "  model/b (float32 [3]): other values, by at most 0.5",
        "  model/c: only in the first (float32 [1])",
    ]


def test_the_doctor_ends_with_how_much_is_to_be_repaired(capsys: pytest.CaptureFixture[str]) -> None:
    """A list of thirty lines says at its end whether one of them matters."""
    well = Finding("torch", "ok", "2.13")
    for found, last in (
        ([well], "nothing to repair"),
        ([well, Finding("cores", "problem", "none", "buy some")], "1 problem: each repair stands below its line"),
    ):
        print_findings(found)
        assert capsys.readouterr().out.splitlines()[-1] == last
