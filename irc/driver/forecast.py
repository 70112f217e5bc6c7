"""Forecasts of memory, traffic and times of a source, without reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..analysis.forecast import Phase, phase, sizes_after
from ..analysis.sizes import typical_sizes
from ..analysis.topology import Topology
from ..errors import Error
from ..ir.core import Module
from ..pipeline import run_pipeline
from .options import checked_options, source_options
from .pipelines import chosen_pipeline
from .sources import PathLike, Source, find_source

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
    src: PathLike | Module, topology: Topology, tokens: int | None = None, **options: Any
) -> Forecast:
    """Forecast a source at the typical sizes of its symbols.

    A language model has two phases: prefill of `tokens` tokens, and decode of one token after them
    (by default the typical number of tokens, and decode with full caches). Other modules have one
    phase. The other options are those of `compile`.
    """
    from ..backends import DEFAULT, get

    options = checked_options(options)
    source = find_source(src, bound=False, **source_options(options))
    module = source.module
    runs = _runs(module, typical_sizes(module), tokens)
    chosen = chosen_pipeline(get(options.get("backend") or DEFAULT), source, options)
    run_pipeline(module, chosen, ())
    stored = _stored_dtype(source)
    phases: list[Phase] = []
    for run in runs:
        sizes = sizes_after(module, run.sizes, run.past)
        phases.append(phase(run.name, module, sizes, topology, run.tokens, stored))
    return Forecast(module, str(chosen), topology, tuple(phases))


def _stored_dtype(source: Source) -> str | None:
    """The dtype that the config.json of a checkpoint folder names."""
    from ..frontends.huggingface import checkpoint_dtype

    return checkpoint_dtype(source.config) if source.config_path else None


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
