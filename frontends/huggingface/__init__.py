"""Hugging Face checkpoint folders: config.json to a model, safetensors files to its weights.

module = load("Meta-Llama-3-8B", dtype="bf16")        # traced, every weight bound
bind(module, "Meta-Llama-3-8B")                       # only the weights, for a script's model
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.core import Module
from ...weights import Ref
from ..models.family import Dims
from .adapters import check_adapter as check_adapter
from .binding import bind as bind
from .binding import differ, prefix_tensors, tensors
from .config import Model, compute_dtype
from .config import checkpoint_dtype as checkpoint_dtype
from .config import is_of_tensorrt_llm as is_of_tensorrt_llm
from .config import model_of as model_of
from .config import read_config as read_config
from .files import Checkpoint as Checkpoint
from .sentence_modules import bind_dense_layers


def load(
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    dims: Dims | None = None,
    ignore: Sequence[str] = (),
    adapter: str | os.PathLike[str] | None = None,
    part: str = "",
) -> Module:
    """The model of a checkpoint folder as a module whose weights refer to the folder's files.

    `dtype` is the compute dtype: f32, f16 or bf16, by default that of config.json. `dims` replaces
    ranges of symbols. `ignore` names keys of config.json that do not change what is computed, and
    patterns of tensors that the model does not use. `part` is the name of one program of several,
    such as `encoder`. The LoRA `adapter` of a folder is merged.
    """
    config = read_config(folder)
    dtype = compute_dtype(config, dtype)
    model, checkpoint = model_of(config, ignore, part), Checkpoint(folder)
    module, alternatives = _traced(model, checkpoint, dtype, dims)
    if getattr(model.config, "tie_word_embeddings", False):
        untied = replace(model, config=replace(model.config, tie_word_embeddings=False))
        tied = alternatives.keys() - untied.alternatives.keys()
        for name in tied & module.weights.keys():
            table, head = module.weights[name].ref, alternatives[name]
            if differ(checkpoint, table, head):  # transformers uses both as well
                warnings.warn(
                    f"{folder}: config.json sets tie_word_embeddings=true, but {tensors(head)} and "
                    f"{tensors(table)} have different values, so both are used; set it to false to "
                    "hide this",
                    stacklevel=2,
                )
                module, alternatives = _traced(untied, checkpoint, dtype, dims)
    ignore = (*model.family.unused, *ignore)
    bind_dense_layers(module, folder, model.config)
    return bind(module, folder, alternatives=alternatives, ignore=ignore, adapter=adapter)


def _traced(
    model: Model, checkpoint: Checkpoint, dtype: str, dims: Dims | None
) -> tuple[Module, Mapping[str, Ref]]:
    """The module, and where the checkpoint may have its weights instead."""
    module, prefixes = model.trace(dtype, dims), model.family.prefixes
    return module, prefix_tensors(module, model.alternatives, prefixes, checkpoint)
