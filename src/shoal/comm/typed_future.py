"""A future of tensors that PyTorch's C++ can read.

A future that Python makes holds a Python object. C++ that asks for a list of tensors fails on it: DDP's built-in
float16 hook does (`result.isTensorList() INTERNAL ASSERT FAILED`, torch 2.13). TorchScript's futures hold what their
type says, so a function of TorchScript waits for the Python one and then gives the tensors that the call has written.

It takes two changes of threads, some 90 us. That is for float16 alone, in which the hook sends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SOURCE = """
def when(done: Future[Tensor], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def typed(done: Future[Tensor], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(when, done, tensors)
"""


def readable(future: torch.futures.Future, outputs: Sequence[Tensor]) -> torch.futures.Future:
    """`future`, which says that a call has written `outputs`, or one that C++ can read too and that ends like it."""
    if len(outputs) != 1 or outputs[0].dtype != torch.float16:
        return future
    return _script().typed(future.then(_value), list(outputs))


def _value(future: torch.futures.Future) -> Any:
    """In a callback of `then` an error becomes one of C++'s; that of a Python future is a Python object, too."""
    return future.value()


@functools.cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_SOURCE)
