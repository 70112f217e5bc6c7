"""Hugging Face checkpoint folders: config.json to a model, safetensors files to its weights.

module = load("Meta-Llama-3-8B", dtype="bf16")        # traced, every weight bound
bind(module, "Meta-Llama-3-8B")                       # only the weights, for a script's model
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace

from ...ir.core import Module
from ...weights import UnboundRef
from ..models.decoder import DecoderConfig, tied_embeddings
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


def load(
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    dims: Dims | None = None,
    ignore: Sequence[str] = (),
    adapter: str | os.PathLike[str] | None = None,
) -> Module:
    """The model of a checkpoint folder as a module whose weights refer to the folder's files.

    `dtype` is the compute dtype: f32, f16 or bf16, by default that of config.json. `dims` replaces
    ranges of symbols. `ignore` names keys of config.json that do not change what is computed, and
    patterns of tensors that the model does not use. The LoRA `adapter` of a folder is merged.
    """
    config = read_config(folder)
    dtype = compute_dtype(config, dtype)
    model = _as_stored(model_of(config, ignore), folder)
    module, family = model.trace(dtype, dims), model.family
    alternatives = prefix_tensors(module, model.alternatives, family.prefixes, Checkpoint(folder))
    ignore = (*family.unused, *ignore)
    return bind(module, folder, alternatives=alternatives, ignore=ignore, adapter=adapter)


def _as_stored(model: Model, folder: str | os.PathLike[str]) -> Model:
    """The model, untied as transformers does where the checkpoint has a different head."""
    if not isinstance(model.config, DecoderConfig) or not model.config.tie_word_embeddings:
        return model
    checkpoint = Checkpoint(folder)
    for name, head in tied_embeddings(model.config).items():
        if differ(checkpoint, UnboundRef(name), head):
            warnings.warn(
                f"{folder}: config.json sets tie_word_embeddings=true, but {tensors(head)} and "
                f"{name} have different values, so both are used; set it to false to hide this",
                stacklevel=3,
            )
            return replace(model, config=replace(model.config, tie_word_embeddings=False))
    return model
