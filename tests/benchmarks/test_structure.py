"""What `python -m benchmarks.structure` counts, on a package of four small files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.structure import files_to, longest_chain, measure, modules

FILES = {
    "cli/train.py": '"""A verb."""\n\nfrom shoal.middle import Middle\nfrom shoal.comm.wire import Wire\n',
    "middle.py": '"""Between.\n\nTwo more lines.\n"""\n\nfrom shoal.comm.wire import (\n    Wire,\n)\n\n\n'
    "class Middle:\n    pass\n",
    "comm/wire.py": '"""The end."""\n\n\nclass Wire:\n    def send(self):\n        return 1  # a number\n',
    "__init__.py": "# nothing\n",
}


def package(folder: Path) -> Path:
    """The files of `FILES` as a package."""
    for name, text in FILES.items():
        path = folder / "shoal" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "shoal"


def test_lines_are_counted_by_what_they_are(tmp_path: Path) -> None:
    """Every line is code, docstring, import, or a comment or blank."""
    whole = measure(package(tmp_path))["rows"][0]
    assert whole["files"] == 4
    assert whole["lines"] == sum(text.count("\n") for text in FILES.values())
    assert (whole["import"], whole["docstring"], whole["code"]) == (5, 6, 5)
    assert (whole["file_median"], whole["file_p90"], whole["file_most"]) == (5.0, 12, 12)
    assert whole["function_median"] == 2


def test_ways_through_imports_are_counted_in_files(tmp_path: Path) -> None:
    """The longest chain goes through the middle, the shortest way of a reader past it."""
    known = modules(package(tmp_path))
    needs = {name: one.needs for name, one in known.items()}
    assert longest_chain(needs, "shoal.cli", "shoal.comm") == 3
    assert files_to(known, "shoal.cli.train", "Wire") == 2
    assert files_to(known, "shoal.cli.train", "Nothing") == 0
