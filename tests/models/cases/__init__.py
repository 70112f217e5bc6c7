"""Tiny models of every family, a table a group of families: what transformers is asked to make."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

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


@dataclass(frozen=True)
class Case:
    """A tiny model: its model_type, the keys of its config.json, and the meshes that it allows.

    `architecture` is the class of transformers, by default that of AutoModelForCausalLM. `limit`
    is the largest difference to transformers, relative to the largest logit.
    """

    model_type: str
    keys: dict[str, Any] = field(default_factory=lambda: SIZES)
    meshes: tuple[str, ...] = ("tp=2", "tp=3", "pp=2")
    architecture: str = ""
    limit: float = 1e-4

    def save(self, folder: Path, dtype: str = "float32") -> Any:
        """The model with random weights, saved to a folder as safetensors."""
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(1)  # tests run in parallel
        torch.manual_seed(0)
        keys = self.keys | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
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


def cases(kind: str) -> dict[str, Any]:
    """The cases of all tables of this name, such as DECODERS."""
    tables = [import_module(f"{__name__}.{part.name}") for part in iter_modules(__path__)]
    return {name: case for table in tables for name, case in getattr(table, kind, {}).items()}
