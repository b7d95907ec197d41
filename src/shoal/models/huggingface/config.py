"""Table `[model]` of kind "transformers". Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.config.check import Positive, PositiveFloat, Table, says
from shoal.errors import ConfigError
from shoal.files import read_file
from shoal.models.attention_config import AttentionConfig

# Keys of a `[model]` table about a module that Shoal did not write. Imports no torch.
#
# How it is split, where it does not say so itself (`shoal split` proposes these), and which samples depend on each
# other, in batch norms or in a loss.


class ForeignKeys(Table, frozen=True, kw_only=True):
    """Roles and counts for `tensor`, parts for `pipeline`; groups of samples."""

    roles: Annotated[
        dict[str, Literal["column", "row", "packed", "embedding", "head", "replicated"]],
        says(
            "Names of weights, or patterns of them, to what tensor parallelism does with them, for a module that "
            "declares no roles; `shoal split` proposes them."
        ),
    ] = msgspec.field(default_factory=dict)
    counts: Annotated[
        list[str],
        says(
            "Integer attributes of modules, or patterns of them, such as a number of heads, of which each rank of "
            "`layout.tensor` has its share; `shoal split` proposes them."
        ),
    ] = msgspec.field(default_factory=list)
    parts: Annotated[
        Literal["declared", "traced"] | list[list[str]],
        says(
            "Where a pipeline is cut: between the parts that the module declares or that tracing its forward finds, or "
            "lists of modules, one a part, in the order in which the forward calls them; `shoal split` proposes them."
        ),
    ] = "declared"
    base: Annotated[
        dict[str, Any],
        says(
            "Keys in the place of those of `arguments` or `config` that make the width at which rates were found. With "
            "it first values and rates follow the width (muP, arXiv:2203.03466), so that these rates are right here, "
            "too. Heads keep their size."
        ),
    ] = msgspec.field(default_factory=dict)
    group_samples: Annotated[
        Positive | None,
        says(
            "Consecutive samples that depend on each other, as in a contrastive loss; no rank and no microbatch cuts "
            "such a group, and a microbatch is one group by default."
        ),
    ] = None
    batch_norm: Annotated[
        Literal["refused", "grouped", "synchronised"],
        says(
            "Batch norms of the module: refused where ranks or microbatches would cut their batch; replaced by ones "
            "over groups of `group_samples` samples; or by ones over a microbatch of all ranks together, as PyTorch's "
            "`SyncBatchNorm`."
        ),
    ] = "refused"

    def __post_init__(self) -> None:
        if not isinstance(self.parts, str) and not (self.parts and all(self.parts)):
            raise ValueError("parts has no parts, or one without modules: let `shoal split` propose them")
        if self.batch_norm == "grouped" and self.group_samples is None:
            raise ValueError(
                'batch_norm = "grouped" without group_samples: say how many consecutive samples share statistics'
            )
        if self.batch_norm == "synchronised" and self.group_samples is not None:
            raise ValueError(
                f'batch_norm = "synchronised" with group_samples = {self.group_samples}: its statistics are those of '
                'all samples of a microbatch, not of groups; leave group_samples out, or set batch_norm = "grouped"'
            )


CONFIG_FILE = "config.json"
MOST_CONFIG_BYTES = 1 << 22
MOST_LISTS = 1 << 16
"""And objects: a million of them take the collector of garbage seconds in a large process."""


class TransformersConfig(ForeignKeys, frozen=True, kw_only=True, tag_field="kind", tag="transformers"):
    """A model of Hugging Face's transformers (extra `huggingface`), from its config or a local folder."""

    architecture: Annotated[
        str | None,
        says(
            "Its class in transformers, such as LlamaForCausalLM; default: the first of `architectures` in its config."
        ),
    ] = None
    config: Annotated[
        dict[str, Any] | str | None,
        says("Keys of the class's own config, or a JSON file of them. Beside `folder`: keys that replace its own."),
    ] = None
    folder: Annotated[
        str | None,
        says("A folder with config.json and safetensors files, sharded or not. Nothing is read from a network."),
    ] = None
    missing: Annotated[
        list[str],
        says('Patterns of parameters that `folder` may lack, such as "classifier.*"; they are drawn from run.seed.'),
    ] = msgspec.field(default_factory=list)
    attention: Annotated[
        Literal["auto", "sdpa", "eager"] | AttentionConfig,
        says(
            "transformers' attention function; auto: Shoal's own in causal decoders, which context needs, else sdpa. "
            "As a table: which tokens before it a token of a causal decoder sees; `kind` says which."
        ),
    ] = "auto"
    lora_rank: Annotated[
        Positive | None, says("Rank of low-rank adapters (arXiv:2106.09685); they alone are trained. Needs `peft`.")
    ] = None
    lora_alpha: Annotated[
        PositiveFloat | None, says("Adapters are scaled by lora_alpha / lora_rank; default: 2 x lora_rank.")
    ] = None
    lora_targets: Annotated[
        list[str] | None, says('Layers that get adapters, such as ["q_proj", "v_proj"]; default: peft\'s own choice.')
    ] = None
    lora_dropout: Annotated[float, says("Share of the adapters' inputs dropped, keyed per sample.", ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is None and self.config is None:
            raise ValueError("neither config nor folder is given: write the model's config, or name its folder")
        if self.folder is not None and isinstance(self.config, str):
            raise ValueError(
                f"config = {self.config!r} beside folder: the folder has its own config.json; name the file alone, or "
                "write the keys that differ as a table"
            )
        if self.missing and self.folder is None:
            raise ValueError("missing is given without folder: a model from its config is drawn whole; leave it out")
        if self.base and (self.folder is not None or self.lora_rank is not None):
            raise ValueError(
                f"base with {'folder' if self.folder is not None else 'lora_rank'}: first values that follow the width "
                "are those of a model that is trained from its beginning; leave base out"
            )
        if self.lora_rank is None and (self.lora_alpha or self.lora_targets or self.lora_dropout):
            raise ValueError("lora_alpha, lora_targets or lora_dropout without lora_rank: give the adapters a rank")

    @property
    def config_file(self) -> Path | None:
        """The JSON file that the config is read from."""
        if self.folder is not None:
            return Path(self.folder) / CONFIG_FILE
        return Path(self.config) if isinstance(self.config, str) else None


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What the config classes of transformers call the number of experts."""


def config_keys(table: TransformersConfig) -> dict[str, Any]:
    """The model's config as written: the file's keys, then those of the table. Raises `ConfigError`."""
    file = table.config_file
    written = {} if file is None else _keys_of(file, key="model.config" if table.folder is None else "model.folder")
    return written | (table.config if isinstance(table.config, dict) else {})


def vocabulary_of(table: TransformersConfig) -> int | None:
    """The number of token ids that its config states; None where it leaves it to the class. Raises `ConfigError`."""
    found = config_keys(table).get("vocab_size")
    return found if isinstance(found, int) else None


def experts_of(table: TransformersConfig) -> tuple[str, int] | None:
    """The key that states the number of experts, and the number; None where none does. Raises `ConfigError`."""
    keys = config_keys(table)
    return next(((key, keys[key]) for key in _EXPERTS if isinstance(keys.get(key), int)), None)


def _keys_of(file: Path, *, key: str) -> dict[str, Any]:
    repair = f"correct {key}; nothing is downloaded"
    text = read_file(file, limit_bytes=MOST_CONFIG_BYTES, error=ConfigError, repair=repair)
    if text.count(b"[") + text.count(b"{") > MOST_LISTS:
        raise ConfigError(f"{file} has more than {MOST_LISTS} lists and objects, as no config has: {repair}")
    try:
        keys = json.loads(text.decode())  # bytes alone: surrogates would pass
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON ({error}): {repair}") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{file} holds a {type(keys).__name__}, not the keys of a config: {repair}")
    return keys
