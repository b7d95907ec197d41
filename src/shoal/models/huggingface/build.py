"""From a `[model]` table of kind "transformers" to the module: class, config, weights, attention, adapters.

Nothing is read from a network: a folder is a folder on this machine, and weights are safetensors. transformers itself
reads them, so that sharded files, tied weights and renamed keys are those that `from_pretrained` knows.

Low-rank adapters (LoRA, arXiv:2106.09685) by peft: y = W x + (lora_alpha / rank) B A x; A and B are trained.

The layers W stay frozen: they get no gradient, no optimizer state, and nothing of them is sent.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from shoal.errors import ConfigError, MissingExtra
from shoal.models.attention_config import mask_of
from shoal.models.huggingface.causal_cores import use_causal_cores
from shoal.models.huggingface.chain import has_chain
from shoal.models.huggingface.config import TransformersConfig, config_keys
from shoal.models.huggingface.model import Stages, declared_class
from shoal.models.huggingface.tensor_plan import declares_roles, settle_plan, use_exchanges
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import SparseAttention

# Which keys of a config something reads, so that one that nothing reads is refused.
#
# transformers takes any key: what a config class does not know becomes an attribute that nobody looks at. A key is
# known if it is
#
#     declared    a field of the config class, an alias in its `attribute_map`, a property of it, or a key of generation
#     converted   the class takes it out of what it is given, such as `rope_theta`, which goes into `rope_parameters`
#     read        the code of the class or of the model asks for it: `getattr(config, "head_dim", None)`


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


def add_adapters(model: Any, table: TransformersConfig) -> None:
    """Puts adapters on the layers `lora_targets` of a transformers model, in place, and freezes everything else.

    A is drawn from PyTorch's generator, B is 0. Raises `MissingExtra` without peft, and `ConfigError` for targets that
    no layer has.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtra("peft", extra="huggingface", purpose="model.lora_rank") from error
    rank = table.lora_rank
    assert rank is not None
    config = LoraConfig(
        r=rank,
        lora_alpha=table.lora_alpha or 2 * rank,  # type: ignore[arg-type]
        target_modules=table.lora_targets,
        lora_dropout=table.lora_dropout,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        layers = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")}
        )
        raise ConfigError(
            f"model.lora_targets = {table.lora_targets}: peft finds no layer to put adapters on "
            f"({' '.join(str(error).split())}); {type(model).__name__} has layers named {', '.join(layers)}"
        ) from None


def build(table: TransformersConfig) -> nn.Module:
    """The model on the CPU, with the folder's weights or with values drawn from PyTorch's generator.

    Its parameters have transformers' own names; its caches are off. It is called as `shoal.models.huggingface.model`
    says. Raises `ConfigError` for a class, a key or a folder that is not there, `MissingExtra` without transformers.
    """
    architecture = architecture_of(table)
    config = configuration_of(table, architecture)
    model = _made(table, declared_class(architecture, config), config)
    _check_chain(model, architecture, config)
    turn_off_caches(model)
    takes_sdpa = _choose_attention(model, table)
    if table.attention not in ("sdpa", "eager"):
        _use_cores(model, table, takes_sdpa=takes_sdpa)
    use_exchanges(model)
    if table.lora_rank is not None:
        add_adapters(model, table)
    if declares_roles(config):
        settle_plan(model)
    return model.train()


def turn_off_caches(model: nn.Module) -> None:
    """Those of parts, too: a decoder beside an encoder has a configuration of its own."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _check_chain(model: Any, architecture: Any, config: Any) -> None:
    """A model whose pipeline plan names modules that it has not declares none."""
    if isinstance(model, Stages) and not has_chain(model):
        model.__class__ = declared_class(architecture, config, chain=False)


def _choose_attention(model: Any, table: TransformersConfig) -> bool:
    """Has it the one that the table asks for? A class without the one that "auto" prefers keeps transformers' choice.

    Raises `ConfigError` where the table names one that it has not.
    """
    named = table.attention if table.attention in ("sdpa", "eager") else None
    try:
        model.set_attn_implementation(named or "sdpa")
    except ValueError:
        if named is not None:
            raise ConfigError(
                f"model.attention = {table.attention!r}: {type(model).__name__} has no such attention in transformers; "
                'set model.attention to "auto"'
            ) from None
        return False
    return True


def _use_cores(model: Any, table: TransformersConfig, *, takes_sdpa: bool) -> None:
    """Attention by modules of Shoal's, which `[model.attention]` needs. Raises `ConfigError` where it cannot be."""
    mask = mask_of(table.attention)
    core = CausalAttention if mask is None else partial(SparseAttention, mask)
    if not (takes_sdpa and use_causal_cores(model, core)) and mask is not None:
        raise ConfigError(
            f'model.attention.kind = "{mask.variant}": {type(model).__name__} is no decoder of blocks with one plain '
            "causal self-attention each, of which masks leave tokens out; leave [model.attention] out"
        )


def plain(table: TransformersConfig) -> Any:
    """transformers' own class with that config, its weights drawn, and the adapters: what an export is written with."""
    architecture = architecture_of(table)
    model = architecture(configuration_of(table, architecture))
    if table.lora_rank is not None:
        add_adapters(model, table)
    return model


def architecture_of(table: TransformersConfig) -> Any:
    """The class that the table names. Raises `ConfigError` for a name that is no model class of transformers."""
    transformers = import_transformers()
    names = config_keys(table).get("architectures") or []
    name = table.architecture or (names[0] if names else None)
    if name is None:
        raise ConfigError(
            'model.architecture is missing, and the config names no "architectures": name the class, such as '
            "LlamaForCausalLM"
        )
    found = getattr(transformers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        near = difflib.get_close_matches(str(name), dir(transformers), n=1)
        hint = f", did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"model.architecture = {name!r} is no model class of transformers {transformers.__version__}{hint}"
        )
    if getattr(found, "config_class", None) is None:
        raise ConfigError(f"model.architecture = {name!r} is a base class without a config: name a class that is built")
    return found


def configuration_of(table: TransformersConfig, architecture: Any) -> Any:
    """The config, every key of the table known.

    Raises `ConfigError` for one that is not, for a wrong value, and for the config of another model.
    """
    keys, config_class = config_keys(table), architecture.config_class
    check_keys(table.config if isinstance(table.config, dict) else {}, architecture)
    wanted, found = config_class.model_type, keys.get("model_type")
    if found is not None and found != wanted:
        raise ConfigError(
            f'the config is of model_type "{found}", and {architecture.__name__} takes "{wanted}": name a class of '
            "that type in model.architecture"
        )
    try:
        return config_class.from_dict({name: value for name, value in keys.items() if name != "dtype"})
    except Exception as error:
        raise ConfigError(f"{config_class.__name__} refuses model.config: {_one_line(error)}") from None


def _made(table: TransformersConfig, model_class: Any, config: Any) -> Any:
    if table.folder is None:
        try:
            return model_class(config)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{model_class.__name__} cannot be built of model.config: {_one_line(error)}") from None
    folder = Path(table.folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.folder = {table.folder!r} holds no safetensors file: name a folder that save_pretrained wrote, or "
            "write its weights as safetensors"
        )
    try:
        with without_bars():
            model, told = model_class.from_pretrained(
                os.fspath(folder.absolute()), config=config, dtype="auto", local_files_only=True, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # of a damaged file safetensors raises its own kinds
        raise ConfigError(f"model.folder = {table.folder!r} cannot be loaded: {_one_line(error)}") from error
    lacking = [n for n in sorted(told["missing_keys"]) if not any(fnmatchcase(n, p) for p in table.missing)]
    if lacking:
        raise ConfigError(
            f"model.folder = {table.folder!r} has no weights for {', '.join(lacking[:4])}"
            f"{f' and {len(lacking) - 4} others' if len(lacking) > 4 else ''} of {model_class.__name__}: name another "
            "model.architecture, or list in model.missing what is to be drawn"
        )
    return model


def import_transformers() -> Any:
    """The package. Raises `MissingExtra`."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", extra="huggingface", purpose='model.kind = "transformers"') from error
    return transformers


@contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' progress bars, of which every rank would draw one into its log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
