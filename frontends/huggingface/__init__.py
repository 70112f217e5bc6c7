"""Hugging Face checkpoint folders: config.json to a model, safetensors files to its weights.

module = load("Meta-Llama-3-8B", dtype="bf16")        # traced, every weight bound
bind(module, "Meta-Llama-3-8B")                       # only the weights, for a script's model
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...core import Module
from ...errors import Error
from ..models.language_model import Dims
from .binding import bind as bind
from .config import MODEL_TYPES as MODEL_TYPES
from .config import checkpoint_dtype as checkpoint_dtype
from .config import model_of as model_of
from .config import read_config as read_config
from .files import Checkpoint as Checkpoint
from .forms import use_form


def load(
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    dims: Dims | None = None,
    ignore: Sequence[str] = (),
) -> Module:
    """The model of a checkpoint folder as a module whose weights refer to the folder's files.

    `dtype` is what it computes in: f32, f16 or bf16; without it, what config.json names. `dims`
    replaces ranges of B, S, T and C. `ignore` names keys of config.json that do not matter.
    """
    config = read_config(folder)
    model = model_of(config, ignore)
    chosen = dtype or checkpoint_dtype(config)
    if chosen not in ("f32", "f16", "bf16"):
        raise Error(f"a model computes in f32, f16 or bf16, not in {chosen}")
    traced = model.trace(chosen, dims)
    if model.other_refs:
        use_form(traced, Checkpoint(folder), model.other_refs)
    return bind(traced, folder, other_names=model.other_names)
