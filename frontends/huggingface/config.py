"""config.json of a checkpoint folder: its object, its dtype, and the model that it describes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import Error
from ...ir import core
from ...ir.dtypes import DTYPES
from ...json_files import read_object
from ...weights import Ref
from ..models.family import Dims, Family, find_family
from .adapters import CONFIG as ADAPTER
from .files import gguf_hint, hub_hint
from .quantized import KEYS, method_of
from .sentence_modules import with_sentence_modules

_DTYPES = {str(DTYPES[name].numpy): name for name in ("f32", "f16", "bf16")}  # torch's names


@dataclass(frozen=True)
class Model:
    """The model of a config.json: its family, and the sizes that the family read."""

    family: Family[Any]
    config: Any

    def trace(self, dtype: str, dims: Dims | None = None) -> core.Module:
        """The module, its weights unbound."""
        return self.family.trace(self.config, dtype, dims)

    @property
    def alternatives(self) -> Mapping[str, Ref]:
        """Weight -> where a checkpoint may have it instead."""
        return self.family.alternatives(self.config)


def model_of(config: Mapping[str, Any], ignore: Sequence[str] = (), part: str = "") -> Model:
    """The model that a config describes; an Error names every key that irc does not support.

    `part` is the name of one program of several, see Family. How a checkpoint is quantized is no
    property of the model.
    """
    method_of({key: config[key] for key in KEYS if key in config and key not in ignore})
    config = {key: value for key, value in config.items() if key not in KEYS}
    family = find_family(config, ignore).part(part)
    return Model(family, family.read_config(config, ignore))


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a folder's config.json, with the modules of a sentence-transformers folder."""
    path = Path(folder) / "config.json"
    if not path.exists() and (adapter := Path(folder) / ADAPTER).exists():
        base = read_object(adapter).get("base_model_name_or_path")
        raise Error(
            f"{folder} is an adapter of the model {base}, not a model: download that into a "
            f"folder, then irc compile FOLDER --adapter {folder}"
        )
    if not path.exists():
        hint = "" if Path(folder).is_dir() else f"; there is no such folder{hub_hint(folder)}"
        hint = hint or gguf_hint(folder)
        raise Error(f"{folder} is not a checkpoint folder: it has no config.json{hint}")
    return with_sentence_modules(Path(folder), read_object(path))


def is_of_tensorrt_llm(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a TensorRT-LLM checkpoint: it names one architecture."""
    return "architecture" in config and "architectures" not in config


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a config names, f32 by default."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise Error(f"config.json: irc computes in no dtype {name!r}; choose f32, f16 or bf16")
    return dtype


def compute_dtype(config: Mapping[str, Any], dtype: str | None = None) -> str:
    """The dtype in which a model computes: the given one, or that of its config."""
    dtype = dtype or checkpoint_dtype(config)
    if dtype not in ("f32", "f16", "bf16"):
        raise Error(f"the compute dtype is f32, f16 or bf16, not {dtype}")
    return dtype
