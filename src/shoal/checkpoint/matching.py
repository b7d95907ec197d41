"""Do the tensors of a model and those of a checkpoint fit? If not, the first few differences say which model it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.checkpoint.manifest import TensorEntry
from shoal.errors import UsageError

_NAMED = 3


class Expected(NamedTuple):
    """What the model has under a name: the global shape and the element type."""

    shape: tuple[int, ...]
    dtype: str


def require_match(
    saved: Mapping[str, TensorEntry], wanted: Mapping[str, Expected], *, strict: bool, cast: bool
) -> None:
    """Raise `UsageError` unless `saved` can fill `wanted`.

    `strict` also refuses names that only one of them has; `cast` allows other element types.
    """
    both = [name for name in wanted if name in saved]
    differences = [
        _listed("other shapes", [_shapes(name, saved, wanted) for name in both if not _same_shape(name, saved, wanted)])
    ]
    if strict:
        differences.append(_listed("missing in it", sorted(_absent(wanted, saved))))
        differences.append(_listed("only in it", sorted(_absent(saved, wanted))))
    if any(differences):
        raise UsageError(
            f"this run directory holds another model: {'; '.join(filter(None, differences))}. "
            "Set run.directory to a new folder, or go back to the model that wrote it"
        )
    types = [f"{name} is {saved[name].dtype}, not {wanted[name].dtype}" for name in both if _cast(name, saved, wanted)]
    if types and not cast:
        raise UsageError(
            f"{_listed('the checkpoint has other element types', types)}: train in these, or ask for a cast"
        )


def _same_shape(name: str, saved: Mapping[str, TensorEntry], wanted: Mapping[str, Expected]) -> bool:
    return tuple(saved[name].shape) == wanted[name].shape


def _cast(name: str, saved: Mapping[str, TensorEntry], wanted: Mapping[str, Expected]) -> bool:
    return saved[name].dtype != wanted[name].dtype


def _shapes(name: str, saved: Mapping[str, TensorEntry], wanted: Mapping[str, Expected]) -> str:
    return f"{name} {list(saved[name].shape)} there, {list(wanted[name].shape)} here"


def _absent(names: Iterable[str], other: Collection[str]) -> list[str]:
    return [name for name in names if name not in other]


def _listed(what: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{what}: {', '.join(items[:_NAMED])}{more}"
