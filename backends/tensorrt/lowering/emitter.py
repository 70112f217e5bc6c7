"""Writes the graph of a function for TensorRT: every dtype as the module has it.

Networks are strongly typed, so that nothing is widened. Weights, and the position of a rank, are
inputs of the network where they stay outside, and one graph serves all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from irc.backends.lowering import Lowering
from irc.backends.onnx.emitter import Emitter, Rule
from irc.backends.onnx.graph import COLLECTIVE, value_info
from irc.backends.onnx.storage import Form, Storage
from irc.backends.tensorrt.lowering.collectives import WITHOUT_BF16, Collectives, is_native
from irc.backends.tensorrt.lowering.table import lowerings
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN, NAMESPACE, VERSION
from irc.backends.tensorrt.target import Target
from irc.core import Function, Module, Op, Value, Weight
from irc.errors import Error
from irc.ops import AllReduceRmsNorm
from irc.ops.collective import Exchange
from irc.types import Axes

ROWS = ".rows"  # behind the name of a weight whose rows are looked up, besides being multiplied


class TensorRTEmitter(Emitter):
    """See Emitter. `communicators` are those that the graph needs, `scalars` the inputs that hold a
    rank's position along mesh axes, `in_place` the arguments that the graph itself overwrites."""

    compute = ""
    missing: Mapping[str, tuple[str, ...]] = {}

    def __init__(
        self,
        module: Module,
        function: Function,
        storage: Storage,
        ranks: Sequence[int],
        target: Target,
        collectives: Collectives = "auto",
        outside: bool = False,
    ) -> None:
        super().__init__(module, function, storage, ranks)
        self.table: Lowering[Rule] = lowerings(target)
        self.target, self.outside = target, outside
        self.wanted: Collectives = collectives
        self.communicators: dict[str, Axes] = {}
        self.scalars: dict[str, Axes] = {}
        self.in_place: set[str] = set()
        self.natives = self.plugins = 0
        self._rows: dict[Weight, str] = {}
        self._multiplied = {
            value
            for op in function
            for value in op.operands
            if isinstance(value, Weight) and op.opname != "embedding"
        }

    def dtype(self, value: Value | str) -> str:
        """The dtype of a value: as the module says."""
        return value if isinstance(value, str) else value.type.dtype

    def stored(self, weight: Weight) -> tuple[str, str]:
        """(the initializer or input of a weight, its dtype)."""
        if not self.outside:
            return super().stored(weight)
        if weight not in self._stored:
            name, form = self._input(weight, weight.name)
            self._stored[weight] = name, form.dtype
        return self._stored[weight]

    def rows(self, weight: Weight) -> str:
        """The weight as a table whose rows are looked up.

        An input that is also multiplied gets a second one of the same bytes: TensorRT would copy
        the table for the product at every step.
        """
        if not self.outside or weight not in self._multiplied:
            return self.stored(weight)[0]
        if weight not in self._rows:
            self._rows[weight], _ = self._input(weight, weight.name + ROWS)
        return self._rows[weight]

    def _input(self, weight: Weight, wanted: str) -> tuple[str, Form]:
        name = self.graph.fresh(wanted)
        form = self.forms[name] = self.storage.form(weight, self.compute)
        self.graph.inputs.append(value_info(name, form.dtype, form.shape))
        self._fixed.add(name)
        return name, form

    def position(self, op: Op, axes: Axes) -> str | None:
        """The input that holds a rank's position, where that is outside."""
        if not self.outside:
            return None
        for name, known in self.scalars.items():
            if known == axes:
                return name
        name = self.graph.fresh("rank." + ".".join(axes))
        self.graph.inputs.append(value_info(name, "i32", ()))
        self._fixed.add(name)
        self.scalars[name] = axes
        return name

    def whole(self, axes: Axes) -> bool:
        """Whether the ranks along these axes are all that run the engine."""
        return self.module.mesh.ways(axes) == len(self.ranks)

    def collective(self, op: Op, operation: str, ways: int, x: str) -> str:
        """A node that exchanges `x` along dimension 0: TensorRT's own, or the plugin's."""
        assert isinstance(op, (Exchange, AllReduceRmsNorm))
        axes = op.axes
        reduce_op, root = getattr(op, "op", "none"), getattr(op, "root", -1)
        reduce_op = "sum" if isinstance(op, AllReduceRmsNorm) else reduce_op
        if self.wanted == "native" and not self.whole(axes):
            raise Error(
                f"TensorRT's own collectives reach all {len(self.ranks)} ranks of an engine, and "
                f"this {operation} is among the {ways} along {'.'.join(axes)}; compile with a mesh "
                "of one axis, or let the plugin do it (without --collectives native or --triton)"
            )
        if not is_native(operation, self.target, self.whole(axes), self.wanted):
            return self.plugin(axes, operation, reduce_op, root, [x])[0]
        self.natives += 1
        self.communicators[".".join(axes)] = axes
        if operation in WITHOUT_BF16 and self.dtype(op.operands[0]) == "bf16":
            return self.cast(
                self._native(operation, reduce_op, root, ways, self.cast(x, "f32")), "bf16"
            )
        return self._native(operation, reduce_op, root, ways, x)

    def _native(self, operation: str, reduce_op: str, root: int, ways: int, x: str) -> str:
        return self.add(
            COLLECTIVE,
            x,
            collective_operation=operation,
            reduce_op=reduce_op,
            root=root,
            group_size=ways,
            groups=tuple(range(ways)),
            nb_rank=ways,
        )

    def plugin(
        self,
        axes: Axes,
        operation: str,
        reduce_op: str,
        root: int,
        inputs: Sequence[str],
        outputs: int = 1,
        **more: str,
    ) -> list[str]:
        """A node of the plugin IrcCollective; the fields are texts, since TensorRT cuts integers
        to 32 bits."""
        group = ".".join(axes)
        self.communicators[group] = axes
        self.plugins += 1
        return self.graph.several(
            outputs,
            COLLECTIVE_PLUGIN,
            *inputs,
            plugin_version=VERSION,
            plugin_namespace=NAMESPACE,
            operation=operation,
            reduce_op=reduce_op,
            group=group,
            ways=str(self.module.mesh.ways(axes)),
            root=str(root),
            **more,
        )
