"""Builds the shared-memory core and the codecs' kernels, plain C that Python loads with ctypes; everything else stands
in pyproject.toml.

Both are optional: without a C compiler the package installs, ranks of one host use Gloo, and codecs torch, more slowly.
Without the interpreter's headers small calls are slower (`core/python.c`).
"""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/shoal/comm/shm/core")
FLAGS = ["-std=gnu11", "-O3", "-fvisibility=hidden", "-ffp-contract=off"]
KERNELS = Path("src/shoal/codec/core")

setup(
    options={"build_ext": {"parallel": 2}},
    ext_modules=[
        Extension(
            "shoal.comm.shm._core",
            sources=sorted(str(path) for path in FOLDER.glob("*.c")),
            depends=[str(FOLDER / "core.h")],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "shoal.codec._kernels",
            sources=sorted(str(path) for path in KERNELS.glob("*.c")),
            depends=[str(KERNELS / "kernels.h")],
            extra_compile_args=[*FLAGS, "-fno-math-errno"],
            libraries=["m"],
            optional=True,
        ),
    ],
)
