"""Tiny models of every family, a table a group of families: what transformers is asked to make."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from irc.frontends.huggingface import model_of
from tests.fresh import fresh
from tests.layout import ROOT

# What most decoders have; a case sets what its family has besides, or calls otherwise.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # large enough for the logits to tell one token from another
}
# table -> the kind of its models, and the dtypes in which tests compare all of them
TABLES = {
    "DECODERS": ("decoder", ("f32", "bf16")),
    "ENCODER_DECODERS": ("encoder-decoder", ("f32", "bf16")),
    "ENCODERS": ("encoder", ("f32",)),
}
CHECKED = ROOT / "frontends" / "models" / "checked.json"
_LISTS = ("meshes", "schemes")


@dataclass(frozen=True)
class Case:
    """A tiny model: its model_type, the keys of its config.json, and the meshes that it allows.

    `architecture` is the class of transformers, by default that of AutoModelForCausalLM. `limit`
    is the largest difference to transformers, relative to the largest logit. Tests compare it on
    its `meshes` and with its `schemes`, of weights or "int8 caches"; `irc models` lists both.
    """

    model_type: str
    keys: dict[str, Any] = field(default_factory=lambda: SIZES)
    meshes: tuple[str, ...] = ("tp=2", "tp=3", "pp=2")
    architecture: str = ""
    limit: float = 1e-4
    schemes: tuple[str, ...] = ()

    def save(self, folder: Path, dtype: str = "float32") -> Any:
        """The model with random weights, saved to a folder as safetensors."""
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(1)  # tests run in parallel
        torch.manual_seed(0)
        keys = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0} | self.keys
        config = transformers.AutoConfig.for_model(self.model_type, **keys)
        if self.architecture:
            model = getattr(transformers, self.architecture)(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.eval().to(getattr(torch, dtype))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.ndim < 2:  # norms and biases, which begin with ones and zeros
                    tensor.add_(0.2 * torch.randn_like(tensor))
        model.save_pretrained(folder, save_original_format=True)
        return model


def to_build(names: Iterable[str], count: int, stream: int) -> list[str]:
    """Names of which this run builds engines, which takes long: `count`, others in other runs.

    IRC_TEST_ENGINES is another count.
    """
    count = int(os.environ.get("IRC_TEST_ENGINES", count))
    return sorted(fresh(stream).permutation(sorted(names))[:count].tolist())


def cases(kind: str) -> dict[str, Any]:
    """The cases of all tables of this name, such as DECODERS."""
    tables = [import_module(f"{__name__}.{part.name}") for part in iter_modules(__path__)]
    return {name: case for table in tables for name, case in getattr(table, kind, {}).items()}


def checked() -> dict[str, dict[str, Any]]:
    """What tests compare with transformers, by model_type; `irc models` reads it from CHECKED."""
    rows: dict[str, dict[str, Any]] = {}
    for table, (kind, dtypes) in TABLES.items():
        for case in cases(table).values():
            states = states_of(case)
            row: dict[str, Any] = {"kind": kind, "states": [], "dtypes": [*dtypes]}
            row = rows.setdefault(case.model_type, row | {"meshes": [], "schemes": []})
            for name, values in (("states", states), *((n, getattr(case, n)) for n in _LISTS)):
                row[name] += [value for value in values if value not in row[name]]
    return {name: rows[name] for name in sorted(rows)}


def states_of(case: Case) -> list[str]:
    """The states of a model, without the numbers of layers; those of a fixed size say so."""
    config = import_module("transformers").AutoConfig.for_model(case.model_type, **case.keys)
    values = config.to_dict() | {"architectures": [case.architecture] if case.architecture else []}
    model = model_of(values)
    signature = model.family.signature(model.config, "f32")
    grows = {name: "C" in signature.inputs[name].shape for name in signature.aliases.values()}
    texts = (name.rstrip("0123456789") + " (fixed)" * (not grow) for name, grow in grows.items())
    return list(dict.fromkeys(texts))
