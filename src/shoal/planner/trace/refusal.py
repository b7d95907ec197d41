"""Why a model cannot be traced, in one sentence that names the user's own line."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from shoal.errors import ShoalError, UserCodeError

Result = TypeVar("Result")

LOOKS_AT_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


def explained(work: Callable[[], Result], what: str) -> Result:
    """What `work` gives. Raises `UserCodeError` for what goes wrong in it; `what` is its subject ("the model")."""
    try:
        return work()
    except ShoalError:
        raise
    except LOOKS_AT_NUMBERS as error:
        raise UserCodeError(
            f"{what} cannot be traced: {_place(error)} looks at the numbers in a tensor ({error.func}), and a trace "
            "has shapes alone; compute it with torch.where or with masks, or choose the layout by hand"
        ) from None
    except UnsupportedFakeTensorException as error:
        raise UserCodeError(
            f"{what} cannot be traced: {_place(error)} needs what tensors without storage have not ({error.reason}); "
            "choose the layout by hand"
        ) from None
    except Exception as error:
        raise UserCodeError(
            f"{what} cannot be traced: {_place(error)} raised {type(error).__name__}: {_first_line(error)}; run it "
            "once on one batch of the data, or choose the layout by hand"
        ) from None


def _place(error: Exception) -> str:
    """The innermost line that is neither this package's nor PyTorch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _theirs(frame.filename)] or frames
    return f"{os.path.relpath(own[-1].filename)}, line {own[-1].lineno} ({own[-1].line})"


def _theirs(filename: str) -> bool:
    packages = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    return os.path.abspath(filename).startswith(packages) or filename.startswith("<")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").strip()
