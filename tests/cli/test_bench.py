"""`shoal bench` is a table of modules: what a line of it needs, and what it costs those who call another verb."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import bench
from shoal.cli.main import app

RUNNER = CliRunner()


@pytest.mark.parametrize("verb", bench.MODULES)
def test_a_verb_is_the_function_of_its_name_with_an_example(verb: str) -> None:
    """Its help says how to call it."""
    command = getattr(importlib.import_module(bench.MODULES[verb]), verb)
    assert f"Example: shoal bench {verb}" in inspect.getdoc(command)
    shown = RUNNER.invoke(app, ["bench", verb, "--help"], catch_exceptions=False)
    assert f"Example: shoal bench {verb}" in shown.stdout


@pytest.mark.slow
def test_the_list_of_verbs_imports_no_torch() -> None:
    """Neither does a verb's help, nor the help of `shoal`, which imports no benchmark at all."""
    code = (
        "import sys\nfrom shoal.cli.main import app\ntry: app(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, sum(name.startswith('shoal.bench.') for name in sys.modules))"
    )
    for arguments in ([], ["bench"], *(["bench", verb] for verb in bench.MODULES)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, "--help"], capture_output=True, text=True, check=True
        )
        torch_loaded, benchmarks = done.stdout.split()[-2:]
        assert torch_loaded == "False", arguments
        assert (benchmarks == "0") == (arguments == []), arguments


def test_a_verb_is_one_module_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed with its first sentence, parses its options, and refuses what it does not have."""
    (tmp_path / "shoal_bench_extra.py").write_text(
        'def extra(pairs: int = 3) -> None:\n    """Counts pairs."""\n    print("pairs", pairs)\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(bench.MODULES, "extra", "shoal_bench_extra")
    assert "Counts pairs." in RUNNER.invoke(app, ["bench", "--help"]).stdout
    assert RUNNER.invoke(app, ["bench", "extra", "--pairs", "7"]).stdout == "pairs 7\n"
    assert RUNNER.invoke(app, ["bench", "extra", "--turns", "7"]).exit_code == 2
    assert RUNNER.invoke(app, ["bench", "another"]).exit_code == 2
