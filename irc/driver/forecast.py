"""Forecasts of memory, traffic and times of a source, without reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from ..analysis.forecast import Phase, phase, sizes_after
from ..analysis.sizes import typical_sizes
from ..analysis.topology import Topology
from ..errors import Error
from ..ir.core import Module
from .build import run_passes
from .options import Options, selected
from .pipelines import chosen_pipeline
from .sources import SOURCE_OPTIONS, PathLike, Source, find_source

# The symbols in the inputs of language models, see frontends/models/language_model.py.
_ROWS, _TOKENS, _LOGITS, _CAPACITY = "B", "S", "T", "C"


@dataclass(frozen=True)
class Forecast:
    """A forecast: the module after its passes, and a phase per way to call it."""

    module: Module
    pipeline: str
    topology: Topology
    phases: tuple[Phase, ...]


def forecast(
    src: PathLike | Module,
    topology: Topology,
    tokens: int | None = None,
    **options: Unpack[Options],
) -> Forecast:
    """Forecast a source at the typical sizes of its symbols.

    A language model has two phases: prefill of `tokens` tokens, and decode of one token after them
    (by default the typical number of tokens, and decode with full caches). Other modules have one
    phase. The other options are those of `compile`.
    """
    from ..backends import get

    source = find_source(src, bound=False, **selected(options, *SOURCE_OPTIONS))
    module = source.module
    runs = _runs(module, typical_sizes(module), tokens)
    backend = get(options.get("backend") or "onnx")
    chosen = chosen_pipeline(backend, source, options)
    run_passes(module, chosen, ())
    stored = _stored_dtype(source)
    phases: list[Phase] = []
    for run in runs:
        sizes = sizes_after(module, run.sizes, run.past)
        phases.append(phase(run.name, module, sizes, topology, run.tokens, stored))
    return Forecast(module, chosen, topology, tuple(phases))


def _stored_dtype(source: Source) -> str | None:
    """The dtype that the config.json of a checkpoint folder names."""
    folder = None if source.artifact else source.folder
    if folder is None or not (folder / "config.json").is_file():
        return None
    from ..frontends import huggingface

    return huggingface.checkpoint_dtype(huggingface.read_config(folder))


class _Run(NamedTuple):
    """One phase: its sizes in symbols of the source, and its tokens, as in `Phase`."""

    name: str
    sizes: Mapping[str, int]
    tokens: int = 1
    past: int = 0


def _runs(module: Module, sizes: Mapping[str, int], tokens: int | None) -> list[_Run]:
    """The ways to call a module."""
    if not ({_TOKENS, _LOGITS, _CAPACITY} <= sizes.keys() and module.main.aliases()):
        if tokens is not None:
            raise Error("--tokens is for language models, and this module is none; leave it out")
        return [_Run("run", sizes)]
    capacity = sizes[_CAPACITY]
    if tokens is not None and not 1 <= tokens <= capacity:
        why = f"the caches hold {_CAPACITY}={capacity}; give --dims {_CAPACITY}={tokens}"
        raise Error(f"{tokens} tokens do not fit: {why}")
    prompt = min(tokens or sizes[_TOKENS], capacity)
    before = min(tokens or capacity, capacity - 1)
    rows = sizes.get(_ROWS, 1)
    return [
        _Run("decode", {**sizes, _TOKENS: 1, _LOGITS: 1}, rows, before),
        _Run("prefill", {**sizes, _TOKENS: prompt, _LOGITS: 1}, rows * prompt),
    ]
