"""Writes the graph of a function for TensorRT, in the module's own dtypes.

Networks are strongly typed, so nothing is widened. Weights outside the engine, and the positions of
a rank, are inputs of the network, so that one graph serves all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.lowering import Lowering
from irc.backends.onnx.emitter import Emitter, Rule
from irc.backends.onnx.graph import value_info
from irc.backends.onnx.storage import Form, Storage
from irc.backends.tensorrt.lowering.table import lowerings
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN, NAMESPACE, VERSION
from irc.backends.tensorrt.target import Target
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.types import Axes
from irc.ops.collective import Exchange
from irc.weights import Ref, UnboundRef
from irc.weights.steps import Cast, Slice, Step, Transpose

# What an odd size of a product's weight is padded to a multiple of, that of i8 and f8e4m3 last.
ALIGNMENT, NARROW_ALIGNMENT = 8, 16
ROWS = ".rows"  # appended to the name of a weight for the input that a lookup reads


class TensorRTEmitter(Emitter):
    """See Emitter. `communicators` are those that the graph needs, `scalars` the inputs that hold
    a rank's position along mesh axes, `in_place` the arguments that the graph overwrites; `plugins`
    counts the collectives. Nodes of the kinds `avoided` are written in the form that nodes.PLAINER
    names."""

    compute = ""
    missing: Mapping[str, tuple[str, ...]] = {}
    reduces_nan = True

    def __init__(
        self,
        module: Module,
        function: Function,
        storage: Storage,
        ranks: Sequence[int],
        target: Target,
        outside: bool = False,
        avoided: Collection[str] = (),
    ) -> None:
        super().__init__(module, function, storage, ranks)
        self.table: Lowering[Rule] = lowerings(target)
        self.target, self.outside, self.avoided = target, outside, avoided
        self.communicators: dict[str, Axes] = {}
        self.scalars: dict[str, Axes] = {}
        self.in_place: set[str] = set()
        self.plugins = 0
        self.codes: dict[Op, str] = {}  # of values, by the operation that computes their scales
        self._rows: dict[Weight, str] = {}
        self.padded: dict[Value, tuple[str, tuple[int, ...]]] = {}
        self._aligned: dict[Weight, tuple[str, tuple[int, ...]]] = {}
        self._multiplied = {
            value
            for op in function
            for value in op.operands
            if isinstance(value, Weight) and op.opname != "embedding"
        }

    def avoids(self, kind: str) -> bool:
        """Whether a plainer form is to be written in place of nodes of a kind."""
        return kind.rpartition("::")[2] in self.avoided

    def padded_as(self, value: Value, name: str, shape: tuple[int, ...]) -> str:
        """Note that `name` holds a value with padding to a shape, so that its type differs."""
        self.padded[value] = name, shape
        self._names.pop(value, None)
        return name

    def dtype(self, value: Value | str) -> str:
        """The dtype of a value, as in the module."""
        return value if isinstance(value, str) else value.type.dtype

    def converted(self, value: Value, dtype: str) -> str:
        """The value in a dtype."""
        return self.get(value) if value.type.dtype == dtype else self.cast(self.get(value), dtype)

    def stored(self, weight: Weight) -> tuple[str, str]:
        """(the initializer or input of a weight, its dtype)."""
        if not self.outside:
            return super().stored(weight)
        if weight not in self._stored:
            name = self._weight_input(weight, weight.name)
            self._stored[weight] = name, self.forms[name].dtype
        return self._stored[weight]

    def rows(self, weight: Weight) -> str:
        """The weight as a table for lookups.

        If it is also multiplied, this is a second input of the same bytes: TensorRT would copy the
        table for the product at every step.
        """
        if not self.outside or weight not in self._multiplied:
            return self.stored(weight)[0]
        if weight not in self._rows:
            form = self.storage.form(weight, self.compute)
            padded = self.storage.padded(form, ALIGNMENT)  # as in `aligned`, to share its bytes
            form = padded if padded.shape[1:] == form.shape[1:] else form
            self._rows[weight] = self._input(form, weight.name + ROWS)
        return self._rows[weight]

    def aligned(
        self, weight: Weight, unit: int = ALIGNMENT, repeat: bool = False
    ) -> tuple[str, tuple[int, ...]]:
        """(the initializer or input of a weight with padding behind odd sizes, its shape): of
        zeros, or where `repeat`, of what the weight begins with."""
        if weight not in self._aligned:
            form = self.storage.padded(self.storage.form(weight, self.compute), unit, repeat)
            self._aligned[weight] = self._input(form, weight.name), form.shape
        return self._aligned[weight]

    def stored_as(self, weight: Weight, dtype: str) -> str:
        """The initializer or input of a weight converted to a dtype, or as u8 of its bytes."""
        if weight.type.dtype == dtype:
            return self.stored(weight)[0]
        steps = () if dtype == "u8" else (Cast(dtype),)
        return self.cached(("as", weight, dtype), lambda: self._converted(weight, steps, dtype))

    def stored_transposed(self, weight: Weight, dtype: str = "") -> str:
        """The initializer or input of a matrix, stored as its transpose, as `stored_as` does."""
        turn: tuple[Step, ...] = (Transpose((1, 0)),)
        dtype = "" if dtype == weight.type.dtype else dtype
        steps = turn if dtype in ("", "u8") else (Cast(dtype), *turn)
        return self.cached(
            ("transposed", weight, dtype), lambda: self._converted(weight, steps, dtype, turn)
        )

    def _converted(
        self, weight: Weight, steps: Sequence[Step], dtype: str = "", back: Sequence[Step] = ()
    ) -> str:
        """A new initializer or input of a weight after `steps`; the steps `back` lead back."""
        form = self.storage.form(weight, self.compute)
        ref = self.storage.reader.complete(form.ref)
        for step in steps:
            ref = ref.then(step)
        shape = self.storage.reader.shape(ref)
        form = replace(form, ref=ref, dtype=dtype or form.dtype, shape=shape)
        name = self._input(form, weight.name)
        original: Ref = UnboundRef(name, shape if back else None)
        for step in back:
            original = original.then(step)
        self.other_forms.setdefault(weight, original)
        return name

    def held(self, weight: Weight) -> Ref:
        """See Emitter; of a padded weight, the part before the padding."""
        if weight in self._stored or weight not in self._aligned:
            return super().held(weight)
        name, shape = self._aligned[weight]
        sizes = self.storage.reader.shape(weight)
        return UnboundRef(name, shape).then(Slice(tuple((0, size) for size in sizes)))

    def _weight_input(self, weight: Weight, wanted: str) -> str:
        return self._input(self.storage.form(weight, self.compute), wanted)

    def _input(self, form: Form, wanted: str) -> str:
        """A new initializer, or input where weights are outside."""
        name = self.graph.fresh(wanted)
        self.forms[name] = form
        if self.outside:
            self.graph.inputs.append(value_info(name, form.dtype, form.shape))
        else:
            self.graph.initializers[name] = TensorProto(name=name)  # per_rank.py fills it in
        self._fixed.add(name)
        return name

    def position(self, axes: Axes) -> str:
        """The input with a rank's position along mesh axes, i32[]."""
        names = {positions: name for name, positions in self.scalars.items()}
        if axes not in names:
            name = names[axes] = self.graph.fresh("rank." + ".".join(axes))
            self.graph.inputs.append(value_info(name, "i32", ()))
            self._fixed.add(name)
            self.scalars[name] = axes
        return names[axes]

    def collective(self, op: Op, operation: str, group_size: int, x: str) -> str:
        """A node that communicates `x` along dimension 0, of the plugin."""
        assert isinstance(op, Exchange)
        reduce_op: str = getattr(op, "op", "none")
        root: int = getattr(op, "root", -1)
        return self.plugin(op.axes, operation, reduce_op, root, [x])[0]

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
        """A node of the plugin IrcCollective; the fields are texts, since TensorRT truncates
        integers to 32 bits."""
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
            group_size=str(self.module.mesh.group_size(axes)),
            root=str(root),
            **more,
        )


def is_odd(weight: Weight) -> bool:
    """Whether TensorRT would copy the weight of a product."""
    return any(int(str(size)) % 2 and int(str(size)) > ALIGNMENT for size in weight.type.shape)
