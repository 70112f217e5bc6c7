"""Forecasting: from a source, of which no weight is read, to memory, traffic and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.forecast import Phase, phase, sizes_after
from ..analysis.sizes import typical_sizes
from ..analysis.topology import Topology
from ..artifact import is_artifact
from ..core import Module
from ..dims import Dims
from ..errors import Error
from ..verify import verify
from .build import run_passes
from .pipelines import Parallel, chosen_pipeline
from .sources import PathLike, find_source

# The symbols by which language models are called, see frontends/models/language_model.py.
_ROWS, _TOKENS, _LOGITS, _CAPACITY = "B", "S", "T", "C"


@dataclass(frozen=True)
class Forecast:
    """What was forecast: a phase per way to call the module, on which ranks, by which passes."""

    module: Module
    pipeline: str
    topology: Topology
    phases: tuple[Phase, ...]


def forecast(
    src: PathLike | Module,
    topology: Topology,
    *,
    parallel: Parallel | None = None,
    backend: str = "onnx",
    pipeline: str | None = None,
    checkpoint: PathLike | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    tokens: int | None = None,
) -> Forecast:
    """Forecast a source at the typical sizes of its symbols.

    A language model has two phases: prefill of `tokens` tokens, and decode of one after them; the
    typical number of tokens, and decode with caches that are full, unless given. Anything else has
    one phase. The other options are those of `compile`.
    """
    from ..backends import get

    source = find_source(src, checkpoint, dtype, settings, dims, bound=False)
    module = source.module
    verify(module)
    sizes = typical_sizes(module)
    runs = _runs(module, sizes, tokens)
    chosen = chosen_pipeline(get(backend), module, parallel or Parallel(), pipeline, source.folder)
    run_passes(module, chosen, ())
    stored = _stored_dtype(source.folder)
    phases = [
        phase(
            run.name, module, sizes_after(module, run.sizes, run.past), topology, run.tokens, stored
        )
        for run in runs
    ]
    return Forecast(module, chosen, topology, tuple(phases))


def _stored_dtype(folder: Path | None) -> str | None:
    """The dtype that the config.json of a checkpoint folder names."""
    if folder is None or not (folder / "config.json").is_file() or is_artifact(folder):
        return None
    from ..frontends import huggingface

    return huggingface.checkpoint_dtype(huggingface.read_config(folder))


@dataclass(frozen=True)
class _Run:
    """One phase: its sizes in symbols of the source, and its tokens, as in `Phase`."""

    name: str
    sizes: Mapping[str, int]
    tokens: int = 1
    past: int = 0


def _runs(module: Module, sizes: Mapping[str, int], tokens: int | None) -> list[_Run]:
    """The ways to call a module."""
    model = {_TOKENS, _LOGITS, _CAPACITY} <= set(sizes) and module.main.aliases()
    if not model:
        if tokens is not None:
            raise Error("--tokens is for language models, and this module is called in another way")
        return [_Run("run", sizes)]
    capacity = sizes[_CAPACITY]
    if tokens is not None and not 1 <= tokens <= capacity:
        raise Error(
            f"{tokens} tokens do not fit: the caches hold {_CAPACITY}={capacity}; "
            f"give --dims {_CAPACITY}={tokens}"
        )
    prompt = min(tokens or sizes[_TOKENS], capacity)
    before = min(tokens or capacity, capacity - 1)
    rows = sizes.get(_ROWS, 1)
    return [
        _Run("decode", {**sizes, _TOKENS: 1, _LOGITS: 1}, rows, before),
        _Run("prefill", {**sizes, _TOKENS: prompt, _LOGITS: 1}, rows * prompt),
    ]
