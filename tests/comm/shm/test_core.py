"""The core as the interpreter sees it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from shoal.comm.shm.core import load_call


def test_calls_of_the_interpreter_are_built_where_its_headers_are() -> None:
    there = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    assert (load_call() is not None) == there, (
        "the core is older than the headers: `setup.py build_ext --force --inplace`"
    )


@pytest.mark.parametrize("arguments", [(), ("a group", *range(8), []), (1 << 80, *range(8), [])])
def test_what_cannot_be_a_call_is_refused(arguments: tuple[object, ...]) -> None:
    if (call := load_call()) is None:
        pytest.skip("the core was built without the interpreter's headers")
    with pytest.raises((TypeError, OverflowError)):
        call(*arguments)
