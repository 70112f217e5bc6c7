"""`evaluate` and `evaluate_ranks`: a module's main function applied to arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from irc.argument_checks import check_arrays, check_kind
from irc.backends.recorder import Recorder
from irc.errors import Error
from irc.ir.core import Function, Module, Value
from irc.ir.dims import bind
from irc.ir.layouts import join_arrays, split_array
from irc.ir.types import TensorType
from irc.ops.shapes import run_sizes

from .execute import Executor, Observe
from .inputs import Input, bind_sizes, check_names
from .weights import Arrays as WeightArrays
from .weights import Weights

Array = np.ndarray


def evaluate(
    module: Module,
    inputs: Mapping[str, Any],
    base: Path | str | None = None,
    *,
    weights: WeightArrays | Weights | None = None,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """The results by name, with global shapes. A local module runs on all its ranks, which take
    their shards of the inputs according to its layouts.

    Relative paths of checkpoint files start at `base`. `weights` overrides weights by name.
    `function` names another function than the main one. `sizes` are symbols that the shapes of the
    inputs do not determine, such as B and S where only B*S occurs. In the global view a value of a
    partial type holds the complete sum, so collectives return it unchanged.
    """
    return Run(module, inputs, base, weights, function, sizes).joined()


def evaluate_ranks(
    module: Module,
    inputs: Mapping[str, Any],
    base: Path | str | None = None,
    *,
    weights: WeightArrays | Weights | None = None,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[dict[str, Array]]:
    """The results of every rank of a local module, run in lockstep.

    An input is one global array, of which every rank takes its shard, or a list of an array per
    rank.
    """
    _check_module(module)
    if not module.local:
        raise Error(f"module @{module.name} is in the global view; localize it to run its ranks")
    return Run(module, inputs, base, weights, function, sizes).ranks()


class Run:
    """One evaluation of a function; in the global view there is one rank. See `evaluate`.

    `seen` holds the arrays of the `watched` values, one per rank; `observe` sees all values as
    they are computed, and `recorder` times the operations, see Executor.
    """

    def __init__(
        self,
        module: Module,
        inputs: Mapping[str, Any],
        base: Path | str | None = None,
        weights: WeightArrays | Weights | None = None,
        function: str | None = None,
        sizes: Mapping[str, int] | None = None,
        watched: Collection[Value] = (),
        observe: Observe | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        _check_module(module)
        check_arrays(inputs)
        self.module, self.function = module, _chosen(module, function)
        source = weights if isinstance(weights, Weights) else Weights(module, base, weights)
        check_names(self.function, inputs)
        shared = [_by_rank(module, self.function, arg, inputs) for arg in self.function.args]
        ranks = range(module.mesh.ranks if module.local else 1)
        self.sizes = [
            bind_sizes([shards[rank] for shards in shared], sizes or {}) for rank in ranks
        ]
        args = [_shards(module, shards) for shards in shared]
        executor = Executor(module, source, self.sizes, watched, observe, recorder)
        # Infinities and NaN are results, as on a GPU.
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

    def joined(self) -> dict[str, Array]:
        """The results, joined from their shards where they are sharded."""
        names, layouts = (
            self.function.result_names(),
            [value.type.global_type for value in self.function.returned],
        )
        return {
            name: self._joined(layout, arrays)
            for name, layout, arrays in zip(names, layouts, self.results, strict=True)
        }

    def _joined(self, layout: TensorType, arrays: list[Array]) -> Array:
        if not (self.module.local and any(layout.axes)):
            return arrays[0]
        shape = run_sizes("evaluate", [bind(dim, self.sizes[0]) for dim in layout.shape])
        return join_arrays(arrays, layout.axes, self.module.mesh, shape)


def _check_module(module: object) -> None:
    check_kind("the module", module, Module, "one of irc, as irc.trace and irc.parse return")


def _chosen(module: Module, name: str | None) -> Function:
    if name is None:
        return module.main
    if name not in module.functions:
        raise Error(f"module @{module.name} has no function @{name}")
    return module.functions[name]


def _by_rank(
    module: Module, function: Function, arg: Value, inputs: Mapping[str, Any]
) -> list[Input]:
    """Per rank the array of an argument: its own, or the global one that all share."""
    name = str(arg.name)
    value = inputs[name]
    if not module.local:
        return [Input(name, arg.type, np.asarray(value))]
    ranks = module.mesh.ranks
    if not isinstance(value, (list, tuple)):
        return [Input(name, arg.type.global_type, np.asarray(value))] * ranks
    arrays = cast("Sequence[Any]", value)
    if len(arrays) != ranks:
        raise Error(f"the input {name} has {len(arrays)} arrays, one per rank, for {ranks} ranks")
    return [Input(name, arg.type, np.asarray(array)) for array in arrays]


def _shards(module: Module, inputs: list[Input]) -> list[Array]:
    """The shard that every rank takes of its input."""
    if not module.local:
        return [part.array for part in inputs]
    return [
        split_array(part.array, part.type.axes, module.mesh, rank)
        for rank, part in enumerate(inputs)
    ]
