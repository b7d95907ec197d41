"""A tracer that takes assertions as kept, and says where a forward does what no trace can show."""

from __future__ import annotations

import inspect
import linecache
import operator
import traceback
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TraceError

from shoal.errors import ShoalError


class ForwardTracer(fx.Tracer):
    """`torch.fx.Tracer`, for forwards that check their inputs' sizes by `assert`."""

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assertion holds. Raises `TraceError` for a decision that depends on the data."""
        filename, line = _users_line()
        if linecache.getline(filename, line).lstrip().startswith("assert"):
            return True
        raise TraceError(f"{filename}:{line} decides by a value that is known only when it runs")

    def iter(self, obj: fx.Proxy) -> Any:
        """A tuple that is unpacked. Raises `TraceError` where its length is not known."""
        node = obj.node
        if node.target in ("chunk", torch.chunk) and len(node.args) > 1 and isinstance(node.args[1], int):
            return iter([operator.getitem(obj, index) for index in range(node.args[1])])  # pyright: ignore[reportArgumentType, reportCallIssue]
        try:
            return super().iter(obj)
        except TraceError:
            filename, line = _users_line()
            raise TraceError(f"{filename}:{line} loops over a tensor or tuple whose length is not known") from None


def reason_of(error: Exception) -> str:
    """Why a trace failed, in a line."""
    said = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, TraceError | ShoalError):
        return said
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {said}"


def _users_line() -> tuple[str, int]:
    """Where the forward stands: the innermost frame that is neither torch's nor this module's."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.split(".")[0] != "torch":
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0
