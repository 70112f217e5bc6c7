"""An ONNX file as a module: arguments, weights, operations, results."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize

from irc.argument_checks import check_path, check_texts, whole_number_in
from irc.errors import Error, did_you_mean
from irc.frontends.onnx.builder import Builder, ImportedValue, Node, hint, plain_name
from irc.frontends.onnx.control_flow import with_bags
from irc.frontends.onnx.files import DTYPES, Files, Manifest, embedded_module, manifest_of
from irc.frontends.onnx.protobuf import STANDARD, expanded, library, opset_of, read_model
from irc.frontends.onnx.rules import (
    COLLECTIVE_KINDS,
    TABLE,
    Plugins,
    Table,
    computed,
    is_wrong,
    mesh_of,
    misuse,
    plugin_rules,
    refusal,
)
from irc.ir.core import Function, Module, Result, Value
from irc.ir.dims import Dim, DimLike, Dims, bind, checked_ranges, symbol
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ops import CacheUpdate
from irc.source import Loc
from irc.text.literals import parse_dim

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

_PLACE = re.compile(r"(.*):(\d+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_MOST_INNER = 65_536  # nodes
_SCOPES = "pkg.torch.onnx.name_scopes"
_UNNAMED = re.compile(r"(val|onnx::\w+)_\d+")  # tensors that torch.onnx.export computed of weights
_LARGEST_PROTOBUF = 2_000_000_000  # bytes; more are external data
_SHOWN = 20  # kinds of refused nodes; the others are counted


def import_onnx(
    path: str | Path,
    dims: Dims | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    base: str | Path | None = None,
    equal: Mapping[str, str] | None = None,
    plugins: Plugins | None = None,
    use_text: bool = True,
    trust: bool = False,
) -> Module:
    """The module that an ONNX file describes, its weights referred to where they lie.

    `dims` are ranges (min, typical, max) of symbols, or one size; `equal` says by which other
    symbol one is replaced, where a file has two names for what is always one size. A file of one
    rank among several needs its `mesh` only where its groups leave that open. External data lies
    below the folder of the model, links followed, or below `base`; with `trust` also below the
    folder that the manifest of an artifact names. `plugins` are those whose nodes are read as
    operations, by namespace and name. A file that irc wrote carries the
    text of its module, which is read in place of the nodes unless `use_text` is false or `equal` is
    given. An Error lists every node that irc has no operation for, before anything is built.
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
    manifest = manifest_of(path)
    stated = None if mesh is None else Mesh.parse(mesh)
    folder = Path(base) if base is not None else manifest.base if trust else None
    files = Files(path, folder or path.parent, inside=folder is None, stated=manifest.base)
    for data in manifest.bound.values():
        files.check_inside(data.path, data.name)
    module = embedded_module(model, files, manifest.bound) if use_text and not equal else None
    if module is not None:
        names = {*module.dims, *(name for arg in module.main.args for name in _symbols(arg))}
        module.dims.update(checked_ranges(dims or {}, names))
        return module
    same = {name: symbol(other) for name, other in (equal or {}).items()}
    table = {**plugin_rules(plugins or {}), **TABLE}
    with_bags(model, files)
    tried: set[str] = set()
    while True:
        importer = _Importer(model, files, stated or manifest.mesh, manifest, same, table)
        new = importer.refused - tried
        simpler = expanded(model, new, path) if new else None
        if simpler is None:
            return importer.module(dims or {})
        tried |= new
        model = simpler


def from_graphsurgeon(graph: Any, path: str | Path | None = None, **options: Any) -> Module:
    """The module of a graph of onnx-graphsurgeon, in whatever order its nodes are.

    The graph is written to `path`, where the weights of the module stay; without `path` to a
    folder that goes with the module. `options` are those of import_onnx, such as `dims`.
    """
    try:
        surgeon: Any = import_module("onnx_graphsurgeon")
    except ImportError as error:
        text = f"graphs need onnx-graphsurgeon ({error}): pip install onnx-graphsurgeon"
        raise Error(text) from None
    model = surgeon.export_onnx(graph, do_type_check=False)
    with ExitStack() as stack:
        if path is None:
            path = f"{stack.enter_context(TemporaryDirectory(prefix='irc-graph-'))}/model.onnx"
        words = {"location": f"{Path(path).name}.data"}
        is_large = model.ByteSize() >= _LARGEST_PROTOBUF
        library().save_model(model, path, save_as_external_data=is_large, **words)
        module = import_onnx(path, **options)
        finalize(module, stack.pop_all().close)
    return module


class _Importer:
    """One file that is being read."""

    def __init__(
        self,
        model: ModelProto,
        files: Files,
        mesh: Mesh | None,
        manifest: Manifest,
        equal: Mapping[str, DimLike],
        table: Table,
    ) -> None:
        self.model, self.files, self.stated_mesh, self.table = model, files, mesh, table
        self.opset = opset_of(model, str(files.path))
        self.values: MutableMapping[str, ImportedValue] = {}
        self.inner = 0  # nodes that were read in graphs of others
        self.written: dict[str, None] = {}  # the symbols of the inputs, before any is replaced
        self.manifest, self.equal, self.unsupported = manifest, equal, _Unsupported(files.path)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        rank = whole_number_in(metadata.get("irc.rank", ""))
        self.rank = manifest.rank if rank is None else rank
        self.name = plain_name(metadata.get("irc.module") or files.path.stem) or "model"
        self.nodes = [self._node(i, proto) for i, proto in enumerate(model.graph.node)]
        for node in self.nodes:
            reason = refusal(node, table=self.table)
            if reason is not None:
                self.unsupported.add(node, reason)
        # the kinds of standard operators among the refused nodes; what is wrong is not expanded
        self.refused = {node.kind for node in self.unsupported.nodes if not node.domain}
        self.refused -= {node.kind for node in self.nodes if is_wrong(node)}

    def module(self, dims: Dims) -> Module:
        """Everything, in order."""
        graph, nodes = self.model.graph, self.nodes
        joint = [node for node in nodes if node.kind in COLLECTIVE_KINDS]
        if not self.unsupported.nodes.isdisjoint(joint):  # a mesh needs all of them
            self.unsupported.check()
        mesh = mesh_of(joint, self.stated_mesh, self.rank)
        module = Module(self.name, mesh, local=bool(joint) or mesh.ranks > 1)
        arguments = [(name, module.own(type)) for name, type in self._arguments()]
        function = Function("forward", arguments)
        symbols = dict.fromkeys(name for arg in function.args for name in _symbols(arg))
        self._check_equal()
        module.dims.update(checked_ranges(dims, symbols))
        self.builder = b = Builder(module, function, self.files)
        b.rank, b.names, b.read_graph = self.rank, self._names(), self._graph
        self._add_sources(function)
        for node, proto in zip(nodes, graph.node, strict=True):
            self._read(node, proto)
        if len(symbols) > 1:
            self.unsupported.hint = (
                f"the sizes of the inputs are {', '.join(symbols)}; where two are always one "
                "size, export them with one name, or give import_onnx(..., equal={...})"
            )
        self.unsupported.check()
        self._finish(module, function)
        return module

    def _check_equal(self) -> None:
        """An Error about a symbol to be replaced that no input has."""
        for name in self.equal:
            if name not in self.written:
                near, names = did_you_mean(name, self.written), ", ".join(self.written)
                raise Error(
                    f"equal: {self.files.path} has no dimension {name!r}{near}; "
                    f"it has {names or 'none with a name'}"
                )

    def _arguments(self) -> list[tuple[str, TensorType]]:
        initial = {tensor.name for tensor in self.model.graph.initializer}
        sources = {*initial, *self.manifest.bound}
        inputs = (value for value in self.model.graph.input if value.name not in sources)
        return [(value.name, self._type(value)) for value in inputs]

    def _type(self, value: ValueInfoProto) -> TensorType:
        type = value.type.tensor_type
        dtype = DTYPES.get(type.elem_type)
        if not value.type.HasField("tensor_type") or dtype is None or not type.HasField("shape"):
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
        return TensorType(dtype, tuple(shape))

    def _add_sources(self, function: Function) -> None:
        """Add the values of the arguments and initializers."""
        args = iter(function.args)
        self._add_initializers(self.model.graph.initializer)
        for value in self.model.graph.input:
            bound = self.manifest.bound.get(value.name)
            if bound is not None:
                self.values[value.name] = ImportedValue(bound.dtype, bound.shape, data=bound)
            elif value.name not in self.values:
                self.values[value.name] = self.builder.imported(next(args))

    def _add_initializers(self, tensors: Sequence[TensorProto]) -> None:
        for tensor in tensors:
            data = self.files.data(tensor)
            self.values[tensor.name] = ImportedValue(data.dtype, data.shape, data=data)

    def _names(self) -> dict[str, str]:
        """Names for weights that torch.onnx.export left without one: of the modules they are in."""
        names: dict[str, str] = {}
        for node, proto in zip(self.nodes, self.model.graph.node, strict=True):
            if node.kind in ("MatMul", "Gemm", "Conv") and node.loc is not None and node.loc.scope:
                for name, part in zip(proto.input[1:], ("weight", "bias"), strict=False):
                    if _UNNAMED.fullmatch(name):
                        names.setdefault(name, f"{node.loc.scope}.{part}")
        return names

    def _node(self, number: int, proto: NodeProto) -> Node:
        """A node without its inputs."""
        domain = "" if proto.domain in STANDARD else proto.domain
        node = Node(proto.op_type, domain, proto.name, number, self.opset, [], list(proto.output))
        # until it is read
        node.inputs = [ImportedValue("f32", ()) if name else None for name in proto.input]
        node.attributes = {attribute.name: self._value(attribute) for attribute in proto.attribute}
        node.misuse = misuse(proto, self.opset) if not domain else None
        metadata = {entry.key: entry.value for entry in proto.metadata_props}
        place = _place(metadata) or (self.files.path.name, number)
        node.loc = Loc(*place, _scope(node, metadata))
        return node

    def _value(self, proto: AttributeProto) -> Any:
        """The value of an attribute."""
        from onnx import GraphProto, TensorProto, helper

        try:
            value: Any = helper.get_attribute_value(proto)
        except ValueError:
            value = None
        if isinstance(value, TensorProto):
            return self.files.data(value)
        if isinstance(value, GraphProto):
            return value
        is_list = isinstance(value, list)
        many = cast("list[Any]", value) if is_list else [value]
        if not all(isinstance(item, (bytes, int, float)) for item in many):
            return f"a {proto.AttributeType.Name(proto.type).lower()}"
        many = [n.decode(errors="replace") if isinstance(n, bytes) else n for n in many]
        return many if is_list else many[0]

    def _read(self, node: Node, proto: NodeProto) -> None:
        """One node: what it gives, named after its outputs; a refusal is kept for later."""
        if self.unsupported.skips(node, list(proto.input)):
            return
        try:
            self._compute(node, proto)
        except Error as error:
            self.unsupported.add(node, error.message, error.at(loc=node.loc))

    def _compute(self, node: Node, proto: NodeProto) -> None:
        b = self.builder
        node.inputs = [self._input(name) if name else None for name in proto.input]
        b.loc, first = node.loc, len(b.ops)
        for name, result in zip(node.outputs, computed(b, node, self.table), strict=False):
            if name and result is not None:
                self.values[name] = replace(result, node=node)
                value = result.value
                if value is not None and value.producer in b.ops[first:]:
                    value.name = value.name or hint(name) or None

    def _graph(self, graph: GraphProto, inputs: Sequence[ImportedValue]) -> list[ImportedValue]:
        """The results of a graph in a node, which may be read again: its values end with it."""
        self.inner += 1 + len(graph.node)
        if self.inner > _MOST_INNER:
            raise Error(
                f"all iterations of the loops of this file have more than {_MOST_INNER} nodes, and "
                "irc unrolls them; export the model with shorter loops"
            )
        if len(graph.input) != len(inputs):
            raise Error(f"its graph has {len(graph.input)} inputs, and is given {len(inputs)}")
        outer = self.values
        names = [value.name for value in graph.input]
        local = dict(zip(names, inputs, strict=True))
        self.values = ChainMap(local, cast("dict[str, ImportedValue]", outer))
        try:
            self._add_initializers(graph.initializer)
            for number, proto in enumerate(graph.node):
                node = self._node(number, proto)
                why = "it is a collective" if node.kind in COLLECTIVE_KINDS else None
                if (why := why or refusal(node, table=self.table)) is not None:
                    raise Error(f"{node.kind} in its graph: {why}")
                self._compute(node, proto)
            return [self._input(value.name) for value in graph.output]
        finally:
            self.values = outer

    def _input(self, name: str) -> ImportedValue:
        if name not in self.values:
            raise Error(f"it takes {name!r}, a result of a node that irc does not compute")
        return self.values[name]

    def _finish(self, module: Module, function: Function) -> None:
        b, names = self.builder, [value.name for value in self.model.graph.output]
        b.loc = None
        returned: list[Value] = []
        for name in names:
            if name not in self.values:
                is_result = any(name in node.output for node in self.model.graph.node)
                why = "irc does not compute" if is_result else "nothing makes"
                raise Error(f"{self.files.path} has the result {name!r}, which {why}")
            returned.append(b.get(self.values[name]))
        places = {tensor.name: i for i, tensor in enumerate(self.model.graph.initializer)}
        b.finish(returned, places)
        aliases = _aliased(function)
        function.results = tuple(_result(n, aliases.get(i)) for i, n in enumerate(names))
        for result, value in zip(function.results, returned, strict=True):
            result.varies = bool(value.type.global_type.varying)
        used = {name for weight in module.weights.values() for name in weight.ref.files()}
        module.files.update((n, path) for n, path in self.files.names.items() if n in used)
        module.add_function(function)


class _Unsupported:
    """The nodes that are refused, by kind and reason; nodes that need their results are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups: dict[tuple[str, str], list[Node]] = {}
        self.nodes: set[Node] = set()
        self.values: set[str] = set()  # the results of nodes that were not read
        self.behind = 0
        self.hint = ""  # a note for refusals by rules
        self._errors: list[Error | None] = []  # of every node; None where its kind is refused

    def add(self, node: Node, reason: str, error: Error | None = None) -> None:
        """Note that a node cannot be read; `error` is what its rule raised."""
        kind = f"{node.domain}.{node.kind}" if node.domain else node.kind
        self.groups.setdefault((kind, reason), []).append(node)
        self.nodes.add(node)
        self.values.update(node.outputs)
        self._errors.append(error)

    def skips(self, node: Node, inputs: list[str]) -> bool:
        """Whether a node is refused itself, or takes a result of one that is."""
        if node in self.nodes:
            return True
        if self.values.isdisjoint(filter(None, inputs)):
            return False
        self.values.update(node.outputs)
        self.behind += 1
        return True

    def check(self) -> None:
        """Raise an Error that lists all nodes, if any; a sole refusal by a rule as it is."""
        if not self.nodes:
            return
        sole = self._errors[0] if len(self._errors) == 1 else None
        error = sole or self._listed()
        if self.behind:
            were = "needs them and was" if self.behind == 1 else "need them and were"
            error.add_note(f"{_count(self.behind, 'node')} more {were} not checked")
        if self.hint and any(self._errors):
            error.add_note(self.hint)
        raise error from (error.__cause__ if sole else None)

    def _listed(self) -> Error:
        error = Error(f"{self.path} has {_count(len(self.nodes), 'node')} that irc cannot read:")
        for (kind, reason), group in list(self.groups.items())[:_SHOWN]:
            error.add_note(f"{kind} ({len(group)}): {reason}; {_where(group)}")
        if len(self.groups) > _SHOWN:
            error.add_note(f"and {len(self.groups) - _SHOWN} kinds more")
        return error


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _where(group: list[Node]) -> str:
    """The first nodes of a group, with their places."""
    places = [(node.name or f"node {node.number}", node.loc) for node in group[:3]]
    shown = ", ".join(f"{name} at {loc.where()}" if loc else name for name, loc in places)
    return shown + (f" and {len(group) - 3} more" if len(group) > 3 else "")


def _aliased(function: Function) -> dict[int, str]:
    """The results that may overwrite an argument: updates of a cache that nothing else reads."""
    aliases: dict[int, str] = {}
    for i, value in enumerate(function.returned):
        state, sole = value, True
        while isinstance(state.owner, CacheUpdate):
            update = state.owner
            state = update.cache
            sole = sole and state.users == {update: 1}
        free = state.name is not None and state.name not in aliases.values()
        if state is not value and state.owner is function and sole and free:
            aliases[i] = str(state.name)
    return aliases


def _result(name: str, alias: str | None) -> Result:
    """A result; one that updates `state` may be called `state.out`."""
    return Result(alias if alias is not None and name == f"{alias}.out" else name, alias)


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


def _scope(node: Node, metadata: Mapping[str, str]) -> str:
    text = metadata.get(_SCOPES)
    if text is not None:  # a list of names, each longer than the one before; the last is the node
        names = re.findall(r"'([^']*)'", text)
        if len(names) > 1:
            return names[-2]
    path = node.name.strip("/").split("/")
    return ".".join(part for part in path[:-1] if part)


def _place(metadata: Mapping[str, str]) -> tuple[str, int] | None:
    place = _PLACE.fullmatch(metadata.get("loc", ""))
    if place is not None:
        return place[1], int(place[2])
    frames = _FRAME.findall(metadata.get("pkg.torch.onnx.stack_trace", ""))
    return (frames[-1][0].rpartition("/")[2], int(frames[-1][1])) if frames else None
