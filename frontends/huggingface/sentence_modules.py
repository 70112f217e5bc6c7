"""Folders of sentence-transformers: modules.json, and a config.json for each of its modules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...errors import Error
from ...ir.core import Module
from ...json_files import read_list, read_object
from ...weights import Cast, FileRef
from ..models.config_reader import ConfigReader
from ..models.encoder import SENTENCES
from ..models.family import FAMILIES
from ..models.heads import SENTENCE_POOLS, SentenceHead
from .files import Checkpoint, is_below

MODULES, _KEY = "modules.json", "sentence_transformer"
# how the config.json of a Pooling says what is pooled, where it has no pooling_mode
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


def with_sentence_modules(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a folder, with the modules behind the encoder if it has a modules.json.

    They are {"pools": modes, "stages": fields of `Stage`} in the key sentence_transformer, and the
    architecture is SENTENCES. An Error names what irc does not compute.
    """
    path = folder / MODULES
    if not path.exists():
        return {key: value for key, value in config.items() if key != _KEY}
    families = [kind for kind, architecture in FAMILIES if architecture == SENTENCES]
    if config.get("model_type") not in families:
        raise Error(
            f"{path} makes sentence embeddings of model_type {config.get('model_type')!r}; irc "
            f"makes them of {', '.join(families)}. To compile the model alone, give a folder "
            f"without {MODULES}"
        )
    modules = [_module(path, entry) for entry in read_list(path)]
    if [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"] or modules[0][1]:
        raise Error(
            f"{path}: expected a Transformer whose path is empty, then a Pooling, found "
            f"{', '.join(f'{kind} at {inner!r}' for kind, inner in modules)}"
        )
    pools = _pools(_reader(folder, modules[1][1]))
    stages = [stage for kind, inner in modules[2:] for stage in _stages(folder, kind, inner)]
    sentence = {"pools": pools, "stages": stages}
    return {**config, "architectures": [SENTENCES], _KEY: sentence}


def _module(path: Path, entry: object) -> tuple[str, str]:
    """The class of a module, and its folder."""
    match entry:
        case {"type": str(kind), "path": str(inner)} if is_below(inner):
            return kind.rpartition(".")[2], inner
        case _:
            raise Error(f"{path}: expected a type, and a path below its folder, found {entry}")


def _reader(folder: Path, inner: str) -> ConfigReader:
    path = folder / inner / "config.json"
    values = read_object(path)
    if isinstance(values.get("pooling_mode"), str):
        values["pooling_mode"] = [values["pooling_mode"]]
    return ConfigReader(values, str(path))


def _pools(config: ConfigReader) -> list[str]:
    config.ignore("word_embedding_dimension embedding_dimension")
    config.require("include_prompt", True, "irc has no prompts that pooling could leave out")
    flags = [mode for flag, mode in _FLAGS.items() if config.flag(flag)]
    modes = config.words("pooling_mode") or flags or ["mean"]
    if set(modes) - set(SENTENCE_POOLS):
        raise config.error("pooling_mode", f"expected some of {', '.join(SENTENCE_POOLS)}")
    config.finish("sentence embeddings")
    return modes


def _stages(folder: Path, kind: str, inner: str) -> list[dict[str, Any]]:
    """The fields of `Stage` of a module; none where it does nothing."""
    if kind in ("Normalize", "Dropout"):
        return [{}] if kind == "Normalize" else []
    if kind != "Dense":
        raise Error(f"{folder / MODULES}: irc has no {kind}, only Normalize, Dense and Dropout")
    config = _reader(folder, inner)
    act = config.word("activation_function", "Tanh").rpartition(".")[2]
    if act not in _ACTIVATIONS:
        raise config.error("activation_function", f"irc has {', '.join(_ACTIVATIONS)}")
    sizes = {name: config.integer(name) for name in ("in_features", "out_features")}
    bias = config.flag("bias", True)
    config.finish("sentence embeddings")
    return [{"folder": inner, **sizes, "bias": bias, "act": _ACTIVATIONS[act]}]


def bind_dense_layers(module: Module, folder: str | os.PathLike[str], config: object) -> None:
    """Let the dense layers behind the pooling refer to the files in their folders."""
    head = getattr(config, "head", None)
    stages = head.stages if isinstance(head, SentenceHead) else ()
    for index, stage in enumerate(stage for stage in stages if stage.folder):
        checkpoint, file = Checkpoint(Path(folder) / stage.folder), f"dense_{index}"
        for part in ("weight", "bias") if stage.bias else ("weight",):
            weight, key = module.weights[f"head.dense.{index}.{part}"], f"linear.{part}"
            tensor = checkpoint.tensor(key) if key in checkpoint else None
            if tensor is None or tensor.shape != weight.type.shape:
                shown = tensor and list(tensor.shape)
                raise Error(f"{checkpoint.folder}: {key} is {shown}; expected {weight.type}")
            module.files[file] = (checkpoint.folder / checkpoint.file(key)).as_posix()
            ref, dtype = FileRef(file, key), weight.type.dtype
            weight.ref = ref if tensor.dtype == dtype else ref.then(Cast(dtype))
