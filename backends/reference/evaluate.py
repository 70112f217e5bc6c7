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
    if module.local:
        return evaluate_ranks(
            module, inputs, base, weights=weights, function=function, sizes=sizes
        )[0]
    return _run(module, _chosen(module, function), [dict(inputs)], base, weights, sizes or {})[0]


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
    ranks = module.mesh.ranks
    per_rank: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for name, given in inputs.items():
        for rank, array in enumerate(_per_rank(name, given, ranks)):
            per_rank[rank][name] = array
    return _run(module, _chosen(module, function), per_rank, base, weights, sizes or {})


def _chosen(module: Module, name: str | None) -> Function:
    if name is None:
        return module.main
    if name not in module.functions:
        raise Error(f"module @{module.name} has no function @{name}")
    return module.functions[name]


def _per_rank(name: str, given: Any, ranks: int) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * ranks
    if len(given) != ranks:
        raise Error(f"the input {name} has {len(given)} arrays, one per rank, for {ranks} ranks")
    return given


def _run(
    module: Module,
    function: Function,
    inputs: list[dict[str, Any]],
    base: Path | str | None,
    weights: Given | Weights | None,
    known: Mapping[str, int],
) -> list[dict[str, Array]]:
    source = weights if isinstance(weights, Weights) else Weights(module, base, weights)
    bound = [bind_inputs(function, given, known) for given in inputs]
    args = [list(arrays) for arrays in zip(*(arrays for arrays, _ in bound), strict=True)]
    executor = Executor(module, source, [found for _, found in bound])
    # Overflow to infinity and 0/0 are results like any other here, as they are on a GPU.
    with np.errstate(all="ignore"):
        results = executor.function(function, args)
    names = function.result_names()
    return [
        {name: arrays[rank] for name, arrays in zip(names, results, strict=True)}
        for rank in range(len(inputs))
    ]
