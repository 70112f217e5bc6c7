"""The table of operators that can be read, with the rules of plugins and collectives.

A rule makes operations of a node. A row of `irc/onnx_format/operators.py` is the rule of an
operator that has no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node
from irc.frontends.onnx.fold import FOLDED, folded
from irc.frontends.onnx.protobuf import schema_of
from irc.ir.core import Op, Value
from irc.ir.declare import REGISTRY
from irc.ir.mesh import Mesh
from irc.onnx_format.operators import COLLECTIVE, COLLECTIVES, DIRECT, DOMAIN, ELEMENTWISE, Row

if TYPE_CHECKING:
    from onnx import NodeProto

Results: TypeAlias = ImportedValue | Value | Op | Sequence[ImportedValue | Value | None]
Rule: TypeAlias = Callable[[Builder, Node], Results]
# Why a node cannot be read, or None: by its attributes and the number of its operands alone.
Refusal: TypeAlias = Callable[[Node], str | None]

MICROSOFT = "com.microsoft"
VERSION, NAMESPACE = "plugin_version", "plugin_namespace"
_HINTS = {
    "MatMulNBits": "; quantize in the form of QuantizeLinear and DequantizeLinear (QDQ)",
    "DynamicQuantizeLSTM": "; name other operators to quantize_dynamic in op_types_to_quantize",
}


@dataclass(frozen=True)
class ImportRule:
    """How nodes of one kind are read.

    What ONNX forbids is refused, and attributes that are not among `attributes`. Where these are
    None, the operator is a plugin's, and its rule alone decides.
    """

    rule: Rule
    attributes: frozenset[str] | None
    refuses: Refusal | None = None


Table: TypeAlias = Mapping[tuple[str, str], ImportRule]  # by domain and kind


def row_rule(cls: type[Op], row: Row) -> Rule:
    """The rule of an operator that is one operation, whose operands are the node's inputs."""

    def rule(b: Builder, node: Node) -> ImportedValue:
        operands = [node.input(i) for i in range(len(node.inputs))]
        return b.op(cls, *[operands] if cls.variadic else operands, **row.to_irc(node.attributes))

    return rule


TABLE: dict[tuple[str, str], ImportRule] = {
    ("", row.kind): ImportRule(row_rule(cls, row), frozenset(row.attributes))
    for cls, row in (ELEMENTWISE | DIRECT).items()
}
_ROWS = set(TABLE)  # which a rule may replace, once


def imports(
    *kinds: str, attributes: str = "", domain: str = "", refuses: Refusal | None = None
) -> Callable[[Rule], Rule]:
    """Put a rule into the table for some kinds of nodes, with the attributes that it reads."""

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            assert (domain, kind) not in TABLE.keys() - _ROWS
            _ROWS.discard((domain, kind))
            TABLE[domain, kind] = ImportRule(rule, frozenset(attributes.split()), refuses)
        return rule

    return register


def computed(b: Builder, node: Node, table: Table = TABLE) -> list[ImportedValue | None]:
    """What a node gives: elements that are known while reading, or the results of its rule."""
    rule = table[node.domain, node.kind].rule
    is_folded = node.kind in FOLDED and not node.domain
    known = folded(node, partial(results_of, rule)) if is_folded else None
    return [known] if known is not None else results_of(rule, b, node)


def results_of(rule: Rule, b: Builder, node: Node) -> list[ImportedValue | None]:
    """What a rule gives, as a value of the graph for each result of the node."""
    for operand in node.present():
        operand.builder = b
    results = rule(b, node)
    if isinstance(results, Op):
        results = results.results
    many = [results] if isinstance(results, (ImportedValue, Value)) else results
    return [b.imported(result) if isinstance(result, Value) else result for result in many]


def produced_by(value: ImportedValue | None, kind: str) -> Node | None:
    """The standard node that computes a value, if it is of this kind."""
    node = value.node if value is not None else None
    return node if node is not None and node.kind == kind and not node.domain else None


def refusal(node: Node, table: Table = TABLE) -> str | None:
    """Why a node cannot be read, or None if it can."""
    rule = table.get((node.domain, node.kind))
    if rule is None and not node.attributes.keys().isdisjoint((VERSION, NAMESPACE)):
        return "it is a plugin's; name the file that registers that with --load"
    if rule is None:
        return node.misuse or "irc has no operation for it" + _HINTS.get(node.kind, "")
    if rule.attributes is not None and node.misuse is not None:
        return node.misuse
    for name, value in node.attributes.items():
        if rule.attributes is not None and name not in rule.attributes:
            return f"its attribute {name}={_shown(value)} is unknown"
    return rule.refuses(node) if rule.refuses is not None else None


def only(name: str, *allowed: Any) -> Refusal:
    """Refuses every other value of an attribute."""

    def refuse(node: Node) -> str | None:
        value = node.attributes.get(name, allowed[0])
        supported = value in allowed
        return None if supported else f"its attribute {name}={_shown(value)} is not supported"

    return refuse


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def is_wrong(node: Node) -> bool:
    """Whether ONNX forbids a node of a standard operator, or does not know its attributes."""
    schema = schema_of(node.kind, node.opset)
    unknown = schema is not None and not node.attributes.keys() <= set(schema.attributes)
    return not node.domain and (unknown or node.misuse is not None)


def misuse(node: NodeProto, opset: int) -> str | None:
    """What is wrong with a node of a standard operator; None for one that ONNX does not know."""
    schema = schema_of(node.op_type, opset)
    if schema is None:
        return None
    given, least, most = len(node.input), schema.min_input, schema.max_input
    optional = [formal.option == formal.option.Optional for formal in schema.inputs]
    is_complete = all(name or may for name, may in zip(node.input, optional, strict=False))
    if not least <= given <= most or not is_complete:
        more = "" if least == most else " or more" if most > 99 else f" to {most}"
        return f"it has {given} inputs, and the operator takes {least}{more}"
    if not schema.min_output <= len(node.output) <= schema.max_output:
        return f"it has {len(node.output)} outputs"
    types = {attribute.name: attribute.type for attribute in node.attribute}
    for name, declared in schema.attributes.items():
        if name in types and int(declared.type.value) != types[name]:
            return f"its attribute {name} is of another type"
    for name, declared in schema.attributes.items():
        if declared.required and name not in types:
            return f"it lacks the attribute {name}"
    return None


@dataclass(frozen=True)
class Plugin:
    """How the nodes of a plugin are read.

    `operation` is the name of the operation they become, "" for none. `values` gives the fields by
    name from the version and the texts of a node; an Error where these do not fit.
    """

    operation: str
    values: Callable[[str, Mapping[str, str]], Mapping[str, Any]]


Plugins: TypeAlias = Mapping[tuple[str, str], Plugin]  # by namespace and name


def plugin_rules(plugins: Plugins) -> dict[tuple[str, str], ImportRule]:
    """How nodes of plugins are read, by domain and kind, except where the kind is read already."""
    rule = ImportRule(partial(_plugin_operation, plugins), None)
    return {
        (domain, kind): rule
        for namespace, kind in plugins
        for domain in ("", namespace)
        if (domain, kind) not in TABLE
    }


def _plugin_operation(plugins: Plugins, b: Builder, node: Node) -> Results:
    """The operation: inputs are operands in their order, fields attributes of their names."""
    namespace = node.text(NAMESPACE, node.domain)
    plugin = plugins.get((namespace, node.kind))
    if plugin is None:
        raise Error(f"no plugin of this name is registered in its namespace, {namespace!r}")
    if not plugin.operation:
        raise Error("its PluginSpec names no operation; give it operation=...")
    cls = REGISTRY.get(plugin.operation)
    if cls is None:
        raise Error(
            f"its operation {plugin.operation} is declared nowhere; name its file with --load"
        )
    for name, value in node.attributes.items():
        if not isinstance(value, str):
            raise Error(f"its attribute {name} is not text")
    texts = dict(node.attributes)
    version = texts.pop(VERSION, "1")
    texts.pop(NAMESPACE, None)
    fields = plugin.values(version, texts)
    values = {name: value for name, value in fields.items() if name in cls.attribute_types}
    count, least = len(node.inputs), len(cls.operand_names)
    most = least + len(cls.optional_names)
    if not cls.variadic and not least <= count <= most:
        takes = f"{least}" if least == most else f"{least} to {most}"
        raise Error(f"it has {count} inputs, and its operation {cls.opname} takes {takes}")
    plain = count if cls.variadic else least
    operands = [node.input(i) for i in range(plain)]
    values |= {name: node.optional(i) for i, name in enumerate(cls.optional_names, plain)}
    return b.results(cls, *[operands] if cls.variadic else operands, **values)


_DIST = "collective_operation reduce_op root group_size groups nb_rank"
_PLUGIN = f"{VERSION} {NAMESPACE} operation reduce_op group group_size root eps offset"
COLLECTIVE_KINDS = (COLLECTIVE, "IrcCollective")
_SAY = "give the mesh of the file: import_onnx(path, mesh=...)"


def mesh_of(nodes: Sequence[Node], stated: Mesh | None, rank: int | None) -> Mesh:
    """The mesh of the collectives of a file; an Error where the `stated` one lacks their groups."""
    sizes: dict[str, int] = {}
    for node in nodes if stated is None else ():
        name, size = node.text("group", "tp"), _group_size(node)
        if sizes.setdefault(name, size) != size:
            raise Error(
                f"this file has collectives among {sizes[name]} and among {size} ranks; {_SAY}"
            )
    mesh = stated or Mesh(tuple(item for item in sizes.items() if "." not in item[0]))
    for node in nodes:
        _group_axes(node, mesh, rank)
    return mesh


def _group_size(node: Node) -> int:
    return node.integer("nb_rank" if node.kind == COLLECTIVE else "group_size", 1)


def _group_axes(node: Node, mesh: Mesh, rank: int | None) -> str:
    """The axes of the mesh, joined by dots, whose group a node names."""
    size, groups, names = _group_size(node), node.ints("groups") or [], mesh.names
    choices = [names[i:j] for j in range(len(names) + 1) for i in range(j)]
    if node.kind != COLLECTIVE:
        choices = [axes for axes in choices if ".".join(axes) == node.text("group")]
    for axes in sorted(choices, key=len):
        fits = mesh.group_size(axes) == size
        if fits and (not groups or _is_group(mesh, axes, groups, rank)):
            return ".".join(axes)
    group = node.text("group") or groups or ""
    raise Error(f"{node.kind} among {size} ranks {group} has no group in the mesh ({mesh}); {_SAY}")


def _is_group(mesh: Mesh, axes: tuple[str, ...], ranks: list[int], rank: int | None) -> bool:
    """Whether ranks are those of a group over these axes, or the positions of all in one."""
    groups = mesh.groups(axes)
    mine = [group for group in groups if rank is None or rank in group]
    return ranks in mine or ranks == list(range(len(groups[0])))


@imports("IrcCollective", attributes=_PLUGIN)
@imports(COLLECTIVE, attributes=_DIST)
@imports(COLLECTIVE, attributes=_DIST, domain=DOMAIN)
def collective(b: Builder, node: Node) -> Results:
    """The collective that `operation` or `collective_operation` names, along dimension 0."""
    axis = _group_axes(node, b.module.mesh, b.rank)
    kind = node.text("operation" if node.kind != COLLECTIVE else "collective_operation")
    cls = ops.AllReduceRmsNorm if kind == "all_reduce_rms_norm" else COLLECTIVES.get(kind)
    if cls is None:
        raise Error(f"{node.kind} with the operation {kind!r}")
    values: dict[str, Any] = {
        "axis": axis,
        "group_size": _group_size(node),
        "op": node.text("reduce_op", "sum"),
        "root": max(node.integer("root", -1), 0),
        "eps": node.real("eps", 1e-6),
        "offset": node.real("offset", 0.0),
        **dict.fromkeys(("dim", "split", "concat"), 0),
    }
    make: Any = cls
    operands = [b.get(node.input(i)) for i in range(len(cls.operand_names))]
    op = make(*operands, **{n: value for n, value in values.items() if n in cls.attribute_types})
    b.pinned.add(op)
    return b.add(op)
