"""An ONNX file as a module: arguments, weights, operations, results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.core import Function, Module, Op, Value
from irc.dims import Dim, DimLike, Dims, bind, checked_ranges, symbol
from irc.errors import Error, did_you_mean
from irc.frontends.onnx import collectives
from irc.frontends.onnx.builder import Builder, hint, plain_name
from irc.frontends.onnx.caches import aliased, results_of
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import folded
from irc.frontends.onnx.gaps import Gaps
from irc.frontends.onnx.locate import locate
from irc.frontends.onnx.manifest import Manifest, manifest_of
from irc.frontends.onnx.model import STANDARD, opset_of, read_model
from irc.frontends.onnx.plugins import Plugins, readings
from irc.frontends.onnx.readings import TABLE
from irc.frontends.onnx.rules import Made, Table, refusal
from irc.frontends.onnx.schema import misuse
from irc.frontends.onnx.tensors import DTYPES, Data, Files
from irc.given import check_path, check_texts
from irc.mesh import Mesh
from irc.ops import Rank
from irc.text.literals import parse_dim
from irc.types import TensorType

if TYPE_CHECKING:
    from onnx import AttributeProto, ModelProto, NodeProto, ValueInfoProto


def import_onnx(
    path: str | Path,
    dims: Dims | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    base: str | Path | None = None,
    equal: Mapping[str, str] | None = None,
    plugins: Plugins | None = None,
) -> Module:
    """The module that an ONNX file describes, its weights referred to where they lie.

    `dims` are ranges (min, typical, max) of symbols, or one size; `equal` says by which other
    symbol one is replaced, where a file has two names for what is always one size. A file of one
    rank among several needs its `mesh` only where its groups leave that open. External data lies
    beside the model, or below `base`, which the manifest of an artifact names. `plugins` are those
    whose nodes are read as operations, by namespace and name. An Error lists everything that irc
    has no operation for, before anything is built.
    """
    if not isinstance(path, (str, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Error(
            f"import_onnx reads a file, and was given a {type(path).__name__}; write a model that "
            "is in memory with onnx.save(model, 'model.onnx'), and give that path"
        )
    check_texts("equal", equal or {}, '{"past": "seq"}')
    if base is not None:
        check_path("base", base)
    path = Path(path)
    model = read_model(path)
    beside = manifest_of(path)
    given = None if mesh is None else Mesh.parse(mesh)
    place = base if base is not None else beside.base
    files = Files(path, path.parent if place is None else Path(place), inside=place is None)
    same = {name: symbol(other) for name, other in (equal or {}).items()}
    table = {**readings(plugins or {}), **TABLE}
    return _Importer(model, files, given or beside.mesh, beside, same, table).module(dims or {})


class _Importer:
    """One file that is being read."""

    def __init__(
        self,
        model: ModelProto,
        files: Files,
        mesh: Mesh | None,
        beside: Manifest,
        equal: Mapping[str, DimLike],
        table: Table,
    ) -> None:
        self.model, self.files, self.given, self.table = model, files, mesh, table
        self.own = model.producer_name == "irc"
        self.opset = opset_of(model, str(files.path))
        self.entries: dict[str, Entry] = {}
        self.written: dict[str, None] = {}  # the symbols of the inputs, before any is replaced
        self.beside, self.equal, self.gaps = beside, equal, Gaps(files.path)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        rank = metadata.get("irc.rank", "")
        self.rank = int(rank) if rank.isdecimal() else beside.rank
        self.name = plain_name(metadata.get("irc.module") or files.path.stem) or "model"

    def module(self, dims: Dims) -> Module:
        """Everything, in order."""
        graph = self.model.graph
        nodes = [self._node(i, proto) for i, proto in enumerate(graph.node)]
        for node in nodes:
            reason = refusal(node, table=self.table)
            if reason is not None:
                self.gaps.add(node, reason)
        joint = [node for node in nodes if node.kind in collectives.KINDS]
        mesh = self._mesh(joint)
        module = Module(self.name, mesh, local=bool(joint) or mesh.ranks > 1)
        function = Function("forward", self._arguments())
        self.symbols = dict.fromkeys(name for arg in function.args for name in _symbols(arg))
        self._check_equal()
        module.dims.update(checked_ranges(dims, self.symbols))
        self.builder = Builder(module, function, self.files)
        self.builder.rank = self.rank
        self._sources(function)
        for node, proto in zip(nodes, graph.node, strict=True):
            self._read(node, proto)
        if len(self.symbols) > 1:
            self.gaps.hint = (
                f"the sizes of the inputs are {', '.join(self.symbols)}; where two are always one "
                "size, export them with one name, or give import_onnx(..., equal={...})"
            )
        self.gaps.check()
        self._finish(module, function)
        return module

    def _check_equal(self) -> None:
        """An Error about a symbol to be replaced that no input has."""
        for name in self.equal:
            if name not in self.written:
                near, known = did_you_mean(name, self.written), ", ".join(self.written)
                raise Error(
                    f"equal: {self.files.path} has no dimension {name!r}{near}; "
                    f"it has {known or 'none with a name'}"
                )

    def _mesh(self, joint: list[Node]) -> Mesh:
        """The mesh of the collectives; where one is refused, that has to be said first."""
        if not self.gaps.nodes.isdisjoint(joint):
            self.gaps.check()
        return collectives.mesh_of(joint, self.given, self.rank)

    def _arguments(self) -> list[tuple[str, TensorType]]:
        initial = {tensor.name for tensor in self.model.graph.initializer}
        found: list[tuple[str, TensorType]] = []
        taken: set[str] = set()
        for value in self.model.graph.input:
            if value.name in {*initial, *self.beside.bound, *self.beside.scalars}:
                continue
            name = plain_name(value.name.replace(".", "_")) or "input"
            while name in taken:
                name += "_"
            taken.add(name)
            found.append((name, self._type(value)))
        return found

    def _type(self, value: ValueInfoProto) -> TensorType:
        type = value.type.tensor_type
        kind = DTYPES.get(type.elem_type)
        if not value.type.HasField("tensor_type") or kind is None or not type.HasField("shape"):
            raise Error(
                f"the input {value.name!r} of {self.files.path} has no dtype and number of "
                "dimensions that irc knows"
            )
        shape: list[DimLike] = []
        for i, dim in enumerate(type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value != -1:  # which some write for any size
                shape.append(dim.dim_value)
            else:
                name = f"{plain_name(value.name)}_{i}".replace(".", "_")
                written = _dim(dim.dim_param, name)
                self.written |= dict.fromkeys(written.symbols() if isinstance(written, Dim) else ())
                shape.append(bind(written, self.equal))
        return TensorType(kind, tuple(shape))

    def _sources(self, function: Function) -> None:
        """Entries of the arguments and initializers."""
        args = iter(function.args)
        for tensor in self.model.graph.initializer:
            data = self.files.data(tensor)
            self.entries[tensor.name] = Entry(data.dtype, data.shape, data=data)
            if self.own and tensor.name.startswith("rank."):
                self._rank(tensor.name, data)
        for value in self.model.graph.input:
            bound = self.beside.bound.get(value.name)
            if bound is not None:
                self.entries[value.name] = Entry(bound.dtype, bound.shape, data=bound)
            elif value.name in self.beside.scalars:
                self.entries[value.name] = self._position(self.beside.scalars[value.name])
            elif value.name not in self.entries:
                self.entries[value.name] = self.builder.entry(next(args))

    def _rank(self, name: str, data: Data) -> None:
        """The position of the rank along axes, where the number is that."""
        mesh, axis = self.builder.module.mesh, name.removeprefix("rank.")
        axes = tuple(axis.split("."))
        if self.rank is None or not set(axes) <= set(mesh.names) or data.inline is None:
            return
        if data.dtype == "i32" and int(data.inline) == mesh.index(self.rank, axes):
            self.entries[name] = self._position(axis)

    def _position(self, axis: str) -> Entry:
        return Entry("i32", (), make=lambda: self.builder.value(Rank(axis=axis)))

    def _node(self, number: int, proto: NodeProto) -> Node:
        """A node without its inputs."""
        domain = "" if proto.domain in STANDARD else proto.domain
        node = Node(proto.op_type, domain, proto.name, number, self.opset, [], list(proto.output))
        node.own = self.own
        node.inputs = [None] * len(proto.input)
        for i, name in enumerate(proto.input):
            node.inputs[i] = Entry("f32", ()) if name else None  # until it is read
        node.attributes = {
            attribute.name: self._attribute(attribute) for attribute in proto.attribute
        }
        node.misuse = misuse(proto, self.opset) if not domain else None
        metadata = {entry.key: entry.value for entry in proto.metadata_props}
        locate(node, metadata, self.files.path.name)
        return node

    def _attribute(self, proto: AttributeProto) -> Any:
        from onnx import AttributeProto

        match proto.type:
            case AttributeProto.TENSOR:
                return self.files.data(proto.t)
            case AttributeProto.STRING:
                return proto.s.decode(errors="replace")
            case AttributeProto.FLOAT:
                return proto.f
            case AttributeProto.INT:
                return proto.i
            case AttributeProto.INTS:
                return list(proto.ints)
            case AttributeProto.FLOATS:
                return list(proto.floats)
            case AttributeProto.STRINGS:
                return [text.decode(errors="replace") for text in proto.strings]
            case _:
                return f"a {AttributeProto.AttributeType.Name(proto.type).lower()}"

    def _read(self, node: Node, proto: NodeProto) -> None:
        """One node: what it gives, named after its outputs; a refusal is kept for later."""
        if self.gaps.skips(node, list(proto.input)):
            return
        try:
            node.inputs = [self._input(name) if name else None for name in proto.input]
            self.builder.loc, begun = node.loc, len(self.builder.ops)
            results = self._results(node)
        except Error as error:
            self.gaps.refused(node, error.at(loc=node.loc))
            return
        for name, found in zip(node.outputs, results, strict=False):
            if name and found is not None:
                self.entries[name] = self._named(found, node, name, set(self.builder.ops[begun:]))

    def _input(self, name: str) -> Entry:
        if name not in self.entries:
            raise Error(f"it takes {name!r}, a result of a node that irc does not compute")
        return self.entries[name]

    def _results(self, node: Node) -> list[Entry | None]:
        entry = None if node.own and node.final else folded(node)
        made = entry or self.table[node.domain, node.kind].rule(self.builder, node)
        return _entries(self.builder, made)

    def _named(self, entry: Entry, node: Node, name: str, new: set[Op]) -> Entry:
        """The entry of an output; one of another node is copied, so that it stays that node's."""
        if entry.node is not None or entry.data is not None:
            return replace(entry, make=lambda: self.builder.get(entry), name="")
        entry.node = node
        if node.own and not node.final:
            return entry
        entry.name = hint(name)
        value = entry.value if entry.value is not None else entry.base
        made = value.producer if value is not None else None
        if value is None or made is None:
            return entry
        if made in new or (node.own and made.opname == node.opname):
            value.name = value.name or entry.name or None
            self.builder.pinned |= {made} if node.own else set()
        return entry

    def _finish(self, module: Module, function: Function) -> None:
        b, names = self.builder, [value.name for value in self.model.graph.output]
        b.loc = None
        returned: list[Value] = []
        for name in names:
            if name not in self.entries:
                made = any(name in node.output for node in self.model.graph.node)
                why = "irc does not compute" if made else "nothing makes"
                raise Error(f"{self.files.path} has the result {name!r}, which {why}")
            returned.append(b.get(self.entries[name]))
        places = {tensor.name: i for i, tensor in enumerate(self.model.graph.initializer)}
        b.finish(returned, places)
        aliases = aliased(function, names)
        function.results = results_of(names, aliases, self.own)
        module.files.update(
            (name, path)
            for name, path in self.files.names.items()
            if any(name in weight.ref.files() for weight in module.weights.values())
        )
        module.add_function(function)


def _entries(b: Builder, made: Made) -> list[Entry | None]:
    """What a rule gave, as entries."""
    if isinstance(made, Op):
        return [b.entry(value) for value in made.results]
    many = [made] if isinstance(made, (Entry, Value)) else made
    return [b.entry(each) if isinstance(each, Value) else each for each in many]


def _symbols(value: Value) -> list[str]:
    dims = [dim for dim in value.type.shape if isinstance(dim, Dim)]
    return [name for dim in dims for name in dim.symbols()]


def _dim(text: str, otherwise: str) -> DimLike:
    """The dimension that a dim_param says, as an expression where it is one."""
    if not text.strip():
        return symbol(otherwise)
    try:
        return parse_dim(text)
    except Error:
        return symbol(re.sub(r"\W+", "_", text).strip("_") or otherwise)
