"""`evaluate` and `evaluate_ranks`: a module's main function applied to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.core import Function, Module
from irc.errors import Error

from .execute import Executor
from .inputs import bind_inputs
from .weights import Given, Weights

Array = np.ndarray


def evaluate(
    module: Module,
    inputs: Mapping[str, Any],
    base: Path | str | None = None,
    *,
    weights: Given | Weights | None = None,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """The results by name. A local module runs on all its ranks and gives those of rank 0.

    `base` is where relative paths of checkpoint files start. `weights` overrides weights by name.
    `function` is another function than the main one. `sizes` gives symbols that the shapes of the
    inputs do not tell, such as B and S where only B*S is there. In the global view a value whose
    type is a pending sum holds the finished sum, so collectives leave it as it is.
    """
    return run(module, inputs, base, weights, function, sizes)[0]


def evaluate_ranks(
    module: Module,
    inputs: Mapping[str, Any],
    base: Path | str | None = None,
    *,
    weights: Given | Weights | None = None,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[dict[str, Array]]:
    """The results of every rank of a local module, run in lockstep.

    An input is one array for all ranks, or a list with one array per rank.
    """
    if not module.local:
        raise Error(f"module @{module.name} is in the global view; localize it to run its ranks")
    return run(module, inputs, base, weights, function, sizes)


def run(
    module: Module,
    inputs: Mapping[str, Any],
    base: Path | str | None = None,
    weights: Given | Weights | None = None,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[dict[str, Array]]:
    """The results of every rank; a module in the global view has one. See `evaluate`."""
    chosen = _chosen(module, function)
    source = weights if isinstance(weights, Weights) else Weights(module, base, weights)
    bound = [bind_inputs(chosen, given, sizes or {}) for given in _by_rank(module, inputs)]
    args = [list(arrays) for arrays in zip(*(arrays for arrays, _ in bound), strict=True)]
    executor = Executor(module, source, [found for _, found in bound])
    # Overflow to infinity and 0/0 are results like any other here, as they are on a GPU.
    with np.errstate(all="ignore"):
        results = executor.function(chosen, args)
    names = chosen.result_names()
    return [
        {name: arrays[rank] for name, arrays in zip(names, results, strict=True)}
        for rank in range(len(bound))
    ]


def _chosen(module: Module, name: str | None) -> Function:
    if name is None:
        return module.main
    if name not in module.functions:
        raise Error(f"module @{module.name} has no function @{name}")
    return module.functions[name]


def _by_rank(module: Module, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs of each rank."""
    if not module.local:
        return [dict(inputs)]
    ranks = module.mesh.ranks
    spread = {name: _spread(name, given, ranks) for name, given in inputs.items()}
    return [{name: given[rank] for name, given in spread.items()} for rank in range(ranks)]


def _spread(name: str, given: Any, ranks: int) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * ranks
    if len(given) != ranks:
        raise Error(f"the input {name} has {len(given)} arrays, one per rank, for {ranks} ranks")
    return given
