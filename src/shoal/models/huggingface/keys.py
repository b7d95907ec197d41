"""Which keys of a config something reads, so that one that nothing reads is refused.

transformers takes any key: what a config class does not know becomes an attribute that nobody looks at. A key is known
if it is

    declared    a field of the config class, an alias in its `attribute_map`, a property of it, or a key of generation
    converted   the class takes it out of what it is given, such as `rope_theta`, which goes into `rope_parameters`
    read        the code of the class or of the model asks for it: `getattr(config, "head_dim", None)`
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.errors import ConfigError

_WRITTEN_ANYWHERE = frozenset(
    {"architectures", "model_type", "transformers_version", "torch_dtype", "auto_map", "num_labels"}
)
"""Keys of a config.json that no config class declares."""

_OURS: Mapping[str, str] = MappingProxyType(
    {
        "attn_implementation": "the attention function is that of model.attention; write it there",
        "experts_implementation": "experts are computed by Shoal's own exchange; leave it out",
    }
)
"""Keys that transformers takes, and which Shoal sets itself."""

_READS, _TAKES = "reads", "takes"
"""Ways to ask for a key: to read it, or to take it out of the keywords of a config."""


def check_keys(written: Mapping[str, Any], architecture: Any) -> None:
    """Raises `ConfigError` for the first of these keys that nothing reads, with the nearest one that is known."""
    config_class = architecture.config_class
    own, declared = config_class(), declared_keys(config_class)
    for key, value in written.items():
        if key in _OURS:
            raise ConfigError(f"model.config.{key}: {_OURS[key]}")
        if key in declared or _converts(config_class, key, value):
            continue
        read = _asked_by(_READS, *architecture.__mro__, *config_class.__mro__)
        if key not in read:
            taken = {name for name in _asked_by(_TAKES, *config_class.__mro__) if _converts(config_class, name, None)}
            near = difflib.get_close_matches(key, sorted((declared | read | taken) - {*_OURS}), n=1)
            hint = f", did you mean '{near[0]}'?" if near else f"; it has {', '.join(sorted(own.to_dict()))}"
            raise ConfigError(f"model.config.{key}: {config_class.__name__} has no such key{hint}")


def declared_keys(config_class: Any) -> set[str]:
    """The fields of a config class, its aliases and properties, and keys that older folders keep beside them."""
    from transformers import GenerationConfig, PreTrainedConfig

    own = config_class()
    mine = [
        kind for kind in config_class.__mro__ if issubclass(kind, PreTrainedConfig) and kind is not PreTrainedConfig
    ]
    properties = {n for kind in mine for n, value in vars(kind).items() if isinstance(value, property) and value.fset}
    return {
        *own.to_dict(), *own.attribute_map, *vars(own), *properties, *GenerationConfig().to_dict(), *_WRITTEN_ANYWHERE
    }  # fmt: skip


def _converts(config_class: Any, key: str, value: Any) -> bool:
    """Does the class take the key out of what it is given? Where the value fails, it has looked at it."""
    try:
        return key not in vars(config_class(**{key: value}))
    except Exception:
        return True


def _asked_by(kind: str, *classes: Any) -> frozenset[str]:
    """The keys that the modules of these classes ask for in this way; those of single models alone for `_READS`."""
    modules = {found.__module__ for found in classes}
    packages = "transformers.models." if kind == _READS else "transformers."
    return frozenset().union(*(_keys_in(module)[kind] for module in modules if module.startswith(packages)))


@cache
def _keys_in(module: str) -> Mapping[str, frozenset[str]]:
    """The keys that the source of a module asks for."""
    file = getattr(sys.modules.get(module), "__file__", None)
    asked = list(_asked(ast.parse(Path(file).read_text(encoding="utf-8")))) if file and file.endswith(".py") else []
    return {kind: frozenset(key for way, key in asked if way == kind) for kind in (_READS, _TAKES)}


def _asked(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """`config.KEY`, `getattr(config, "KEY")`; of the keywords of a config `kwargs.get("KEY")`, `kwargs.pop("KEY")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_named(node.value, "config"):
            yield _READS, node.attr
        if not isinstance(node, ast.Call):
            continue
        function, strings = node.func, [a.value for a in node.args if isinstance(a, ast.Constant)]
        by_name = isinstance(function, ast.Name) and function.id in ("getattr", "hasattr")
        if by_name and strings and _is_named(node.args[0], "config"):
            yield _READS, str(strings[0])
        if isinstance(function, ast.Attribute) and strings and _is_named(function.value, "kwargs"):
            yield {"get": _READS, "pop": _TAKES}.get(function.attr, ""), str(strings[0])


def _is_named(node: ast.AST, name: str) -> bool:
    """Is it `name`, or an attribute of that name (`self.config`)?"""
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
