"""`evaluate` and `evaluate_ranks`: a module's main function applied to arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from irc.core import Function, Module, Value
from irc.dims import bind
from irc.errors import Error
from irc.given import check_arrays, check_kind
from irc.layouts import join_arrays, split_array
from irc.ops.shapes import run_sizes
from irc.types import TensorType

from .execute import Executor
from .inputs import Input, bind_sizes, check_names
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
    _check_module(module)
    if not module.local:
        raise Error(f"module @{module.name} is in the global view; localize it to run its ranks")
    return Run(module, inputs, base, weights, function, sizes).ranks()


class Run:
    """One evaluation of a function; in the global view there is one rank. See `evaluate`.

    `seen` has the arrays of the values that are `watched`, one per rank.
    """

    def __init__(
        self,
        module: Module,
        inputs: Mapping[str, Any],
        base: Path | str | None = None,
        weights: Given | Weights | None = None,
        function: str | None = None,
        sizes: Mapping[str, int] | None = None,
        watched: Collection[Value] = (),
    ) -> None:
        _check_module(module)
        check_arrays(inputs)
        self.module, self.function = module, _chosen(module, function)
        source = weights if isinstance(weights, Weights) else Weights(module, base, weights)
        check_names(self.function, inputs)
        given = [_by_rank(module, self.function, arg, inputs) for arg in self.function.args]
        ranks = range(module.mesh.ranks if module.local else 1)
        self.sizes = [bind_sizes([each[rank] for each in given], sizes or {}) for rank in ranks]
        args = [_parts(module, each) for each in given]
        executor = Executor(module, source, self.sizes, watched)
        # Overflow to infinity and 0/0 are results like any other here, as they are on a GPU.
        with np.errstate(all="ignore"):
            self.results = executor.function(self.function, args)
        self.seen = executor.seen

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


def _check_module(given: object) -> None:
    check_kind("the module", given, Module, "one of irc, as irc.trace and irc.parse return")


def _chosen(module: Module, name: str | None) -> Function:
    if name is None:
        return module.main
    if name not in module.functions:
        raise Error(f"module @{module.name} has no function @{name}")
    return module.functions[name]


def _by_rank(
    module: Module, function: Function, arg: Value, inputs: Mapping[str, Any]
) -> list[Input]:
    """What every rank is given for an argument: an array of its own, or the whole one."""
    name = str(arg.name)
    given = inputs[name]
    if not module.local:
        return [Input(name, arg.type, np.asarray(given))]
    ranks = module.mesh.ranks
    if not isinstance(given, (list, tuple)):
        return [Input(name, function.argument_layout(arg), np.asarray(given))] * ranks
    arrays = cast("Sequence[Any]", given)
    if len(arrays) != ranks:
        raise Error(f"the input {name} has {len(arrays)} arrays, one per rank, for {ranks} ranks")
    return [Input(name, arg.type, np.asarray(array)) for array in arrays]


def _parts(module: Module, given: list[Input]) -> list[Array]:
    """What every rank takes of what it is given."""
    if not module.local:
        return [each.array for each in given]
    return [
        split_array(each.array, each.type.axes, module.mesh, rank)
        for rank, each in enumerate(given)
    ]
