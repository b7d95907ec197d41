"""Builds the shared-memory core, plain C that Python loads with ctypes; everything else stands in pyproject.toml.

It is optional: without a C compiler the package installs, and ranks of one host use Gloo, more slowly.
Without the interpreter's headers small calls are slower (`core/python.c`).
"""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/shoal/comm/shm/core")

setup(
    ext_modules=[
        Extension(
            "shoal.comm.shm._core",
            sources=sorted(str(path) for path in FOLDER.glob("*.c")),
            depends=[str(FOLDER / "core.h")],
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-ffp-contract=off"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
