"""`evaluate` and `evaluate_ranks`: a module's main function applied to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.core import Function, Module
from irc.dims import bind
from irc.errors import Error
from irc.layouts import join_arrays, split_array
from irc.ops.shapes import run_sizes
from irc.types import TensorType

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
    """The results by name. A local module runs on all its ranks, which by its layouts take their
    parts of the inputs and give the whole results.

    `base` is where relative paths of checkpoint files start. `weights` overrides weights by name.
    `function` is another function than the main one. `sizes` gives symbols that the shapes of the
    inputs do not tell, such as B and S where only B*S is there. In the global view a value whose
    type is a pending sum holds the finished sum, so collectives leave it as it is.
    """
    return Run(module, inputs, base, weights, function, sizes).whole()


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

    An input is one whole array, of which every rank takes its part, or a list with an array per
    rank.
    """
    if not module.local:
        raise Error(f"module @{module.name} is in the global view; localize it to run its ranks")
    return Run(module, inputs, base, weights, function, sizes).ranks()


class Run:
    """One evaluation of a function; in the global view there is one rank. See `evaluate`."""

    def __init__(
        self,
        module: Module,
        inputs: Mapping[str, Any],
        base: Path | str | None = None,
        weights: Given | Weights | None = None,
        function: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.module, self.function = module, _chosen(module, function)
        source = weights if isinstance(weights, Weights) else Weights(module, base, weights)
        given = _by_rank(module, self.function, inputs)
        bound = [bind_inputs(self.function, arrays, sizes or {}) for arrays in given]
        args = [list(arrays) for arrays in zip(*(arrays for arrays, _ in bound), strict=True)]
        self.sizes = [found for _, found in bound]
        executor = Executor(module, source, self.sizes)
        # Overflow to infinity and 0/0 are results like any other here, as they are on a GPU.
        with np.errstate(all="ignore"):
            self.results = executor.function(self.function, args)

    def ranks(self) -> list[dict[str, Array]]:
        """The results of every rank."""
        names = self.function.result_names()
        return [
            {name: arrays[rank] for name, arrays in zip(names, self.results, strict=True)}
            for rank in range(len(self.sizes))
        ]

    def whole(self) -> dict[str, Array]:
        """The results, put together where the ranks hold parts of them."""
        names, layouts = self.function.result_names(), self.function.result_layouts()
        return {
            name: self._joined(layout, arrays)
            for name, layout, arrays in zip(names, layouts, self.results, strict=True)
        }

    def _joined(self, layout: TensorType, arrays: list[Array]) -> Array:
        if not (self.module.local and layout.sharded):
            return arrays[0]
        shape = run_sizes("evaluate", [bind(dim, self.sizes[0]) for dim in layout.shape])
        return join_arrays(arrays, layout.axes, self.module.mesh, shape)


def _chosen(module: Module, name: str | None) -> Function:
    if name is None:
        return module.main
    if name not in module.functions:
        raise Error(f"module @{module.name} has no function @{name}")
    return module.functions[name]


def _by_rank(module: Module, function: Function, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs of each rank."""
    if not module.local:
        return [dict(inputs)]
    ranks = module.mesh.ranks
    spread = {name: _spread(module, function, name, given) for name, given in inputs.items()}
    return [{name: given[rank] for name, given in spread.items()} for rank in range(ranks)]


def _spread(module: Module, function: Function, name: str, given: Any) -> Sequence[Any]:
    ranks = module.mesh.ranks
    if isinstance(given, (list, tuple)):
        if len(given) != ranks:
            raise Error(
                f"the input {name} has {len(given)} arrays, one per rank, for {ranks} ranks"
            )
        return given
    layout = function.layouts.get(f"%{name}")
    if layout is None or np.ndim(given) != layout.rank:
        return [given] * ranks
    whole = np.asarray(given)
    return [split_array(whole, layout.axes, module.mesh, rank) for rank in range(ranks)]
