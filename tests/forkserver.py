"""The forkserver from which tests start processes: it has made the imports that cost a process 5 seconds of a core.

A test session has one, and it imports what was asked of it before its first process; so all ask for the same.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import msgspec

from shoal.runfile.run_file import RunFile

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "transformers.modeling_utils",
    "peft",
    "s3fs",
    "shoal.cli.main",
    "shoal.cli.train",
    "shoal.launcher.script",
    "shoal.comm.mesh",
    "shoal.training",
    "shoal.own_loop.start",
    "shoal.verification.verify",
    "shoal.planning.arrange",
    "tests.forkserver",
]
# What msgspec finds out about the types of a run file: a fifth of what a rank of a small script takes of a core.
msgspec.json.Decoder(RunFile)


def forkserver() -> ForkServerContext:
    """Its context: `forkserver().Process(...)`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
