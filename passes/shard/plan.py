"""Sharding plans: rows of patterns and axes, of which the first that matches a name decides.

`*.q_proj.weight 0@tp` shards the rows of every weight with such a name over tp; `replicated`
replicates it; `0@tp, 1@ep` shards two dimensions. Arguments of the main function are matched as
well. The word `megatron` stands for the default rows. A tensor-parallel plan of Hugging Face
transformers has a style per module or parameter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from irc.errors import Error, did_you_mean
from irc.files import open_file
from irc.ir.core import Module, Value, Weight
from irc.ir.types import Axes
from irc.json_files import read_object
from irc.ops import Embedding
from irc.pipeline import Compilation, Stats

from ..shared.parameters import Product, weights_of

_SPLIT = re.compile(r"(\d+)@([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True)
class Row:
    """One row: a pattern, the axes of dimensions, and the source of the row.

    A row that a user wrote must match something in the model: `must_fit`. Of the rows of one
    `entry` of a tp_plan one must. A row for `tables` is for weights that only lookups use, whatever
    their names.
    """

    pattern: str
    splits: tuple[tuple[int, Axes], ...]
    source: str
    must_fit: bool = False
    entry: str = ""
    tables: bool = False

    def fits(self, name: str, looked_up: bool = False) -> bool:
        """Whether a weight or argument has such a name; `looked_up` says that it is a table."""
        return (looked_up or not self.tables) and fnmatchcase(name, self.pattern)

    @property
    def axes(self) -> Axes:
        """The axes that it names."""
        return tuple(axis for _, axes in self.splits for axis in axes)

    def __str__(self) -> str:
        how = ", ".join(f"{dim}@{'.'.join(axes)}" for dim, axes in self.splits)
        return f"{self.pattern} {how or 'replicated'}"


def row(text: str, source: str) -> Row:
    """A row from its text; an Error says what is wrong with it."""
    pattern, _, how = text.strip().partition(" ")
    if how.strip() == "replicated":
        return Row(pattern, (), source)
    splits: list[tuple[int, Axes]] = []
    for item in filter(None, (part.strip() for part in how.split(","))):
        match = _SPLIT.fullmatch(item)
        if match is None:
            raise Error(
                f"{source}: cannot read {item!r} in {text.strip()!r}; a row is a pattern and "
                "dimension@axis, such as *.q_proj.weight 0@tp, or the word replicated"
            )
        splits.append((int(match[1]), tuple(match[2].split("."))))
    if not splits:
        raise Error(f"{source}: {text.strip()!r} names no dimension and axis")
    return Row(pattern, tuple(splits), source)


def find_row(rows: list[Row], name: str, looked_up: bool = False) -> Row | None:
    """The first row that matches a name. `looked_up`: the weight is a table of lookups."""
    return next((row for row in rows if row.fits(name, looked_up)), None)


COLUMN = (
    "q_proj k_proj v_proj qkv_proj q k v wq wk wv wqkv Wqkv query key value query_key_value c_attn "
    "q_b_proj kv_b_proj gate_proj up_proj gate_up_proj fc1 fc_in c_fc w1 w3 wi wi_0 wi_1 "
    "dense_h_to_4h intermediate.dense lm_head embed_out"
)
ROW = "o_proj out_proj c_proj o wo down_proj fc2 fc_out w2 dense dense_4h_to_h attn_out"
POSITION = (
    "wpe position_embeddings position_embedding embed_positions token_type_embeddings pos_emb "
    "pos_embed segment_embeddings"
)
EMBEDDING = "embed_tokens wte word_embeddings tok_embeddings embedding embed embed_in"
DEFAULT = "megatron"
ENDS = ("lm_head", "embed_out", *EMBEDDING.split())


def plan_of(compilation: Compilation) -> str:
    """The plan that a compilation names, else the config.json with a tp_plan, else ""."""
    if "plan" in compilation.options:
        plan: str | os.PathLike[str] = compilation.options["plan"]
        return os.fspath(plan)
    path = compilation.config_path
    return path if tp_plan_in(dict(compilation.config), path) else ""


def megatron() -> list[Row]:
    """Column-parallel into a block, row-parallel out of it, vocabulary-parallel at both ends.

    Shoeybi et al., 2019. Experts go over ep, and over tp within. What lookups alone use is a table
    of embeddings, whatever it is called.
    """
    rows = [
        row("*experts.gate 0@ep, 1@tp", "megatron: experts, column-parallel"),
        row("*experts.up 0@ep, 1@tp", "megatron: experts, column-parallel"),
        row("*experts.down 0@ep, 2@tp", "megatron: experts, row-parallel"),
    ]
    rows += _named(COLUMN, "0@tp", "0@tp", "column-parallel")
    rows += _named(ROW, "1@tp", "replicated", "row-parallel")
    rows += _named(EMBEDDING, "0@tp", "replicated", "vocabulary-parallel")
    tables = _named(POSITION, "replicated", "replicated", "positions, on every rank")
    tables.append(row("* 0@tp", "megatron: vocabulary-parallel, as only lookups use it"))
    return [*rows, *(replace(row, tables=True) for row in tables)]


def _named(modules: str, weight: str, bias: str, source: str) -> list[Row]:
    """Rows for the parameters of all modules of some names, wherever they are."""
    return [
        row(f"{prefix}{module}.{parameter}* {axes}", f"megatron: {source}")
        for module in modules.split()
        for prefix in ("", "*.")
        for parameter, axes in (("weight", weight), ("bias", bias))
    ]


@dataclass
class Plan:
    """The rows of a plan for a module; `origins` has the old names of renamed weights."""

    module: Module
    rows: list[Row]
    stats: Stats
    origins: dict[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def of(text: str, module: Module, stats: Stats) -> Plan:
        """A plan for a module: megatron, or the path of a file.

        Names of modules decide about matrices [out, in]. One that a product takes as [in, out] gets
        a row of its own, with these dimensions exchanged; rows that a user wrote are taken as they
        are.
        """
        rows, turned = read_plan(text), dict[str, Row]()
        for product in filter(None, map(Product.of, module.ops())):
            if product.inputs > product.outputs:
                continue
            dims = {product.inputs: product.outputs, product.outputs: product.inputs}
            for weight in weights_of(product.parameter) or ():
                row = find_row(rows, weight.name)
                if row and not row.must_fit and weight.type.ndim == product.parameter.type.ndim:
                    splits = tuple((dims.get(dim, dim), axes) for dim, axes in row.splits)
                    turned[weight.name] = replace(row, pattern=escape(weight.name), splits=splits)
        return Plan(module, [*turned.values(), *rows], stats)

    def origin(self, name: str) -> str:
        """The name that a weight had at first."""
        return self.origins.get(name, name)

    def row_of(self, value: Value) -> Row | None:
        """The row of a weight, or of an argument."""
        name = self.origin(value.name) if isinstance(value, Weight) else str(value.name)
        return find_row(self.rows, name, isinstance(value, Weight) and _only_looked_up(value))

    def group_size(self, name: str, dim: int) -> int:
        """The number of ranks over which it shards a dimension of the weights of a name."""
        row, used = find_row(self.rows, self.origin(name)), dict[int, Axes]()
        for at, wanted in row.splits if row is not None else ():
            used[at] = self.mesh_axes(wanted, list(used.values()))
        return self.module.mesh.group_size(used.get(dim, ()))

    def mesh_axes(self, wanted: Axes, used: Sequence[Axes] = ()) -> Axes:
        """The axes of the mesh that a row means.

        `tp` means every rank that shares dense layers: ep.tp where the mesh has an ep and the value
        does not use it otherwise. An axis that the mesh lacks splits nothing.
        """
        mesh = self.module.mesh
        taken = {axis for group in used for axis in group}
        axes: list[str] = []
        for axis in wanted:
            if axis == "tp" and "ep" in mesh.names and "ep" not in taken and "ep" not in wanted:
                axes.append("ep")
            if axis in mesh.names:
                axes.append(axis)
        return tuple(axis for axis in axes if mesh.size(axis) > 1)

    @property
    def axes(self) -> set[str]:
        """The axes that rows name; `tp` stands for ep.tp, see `mesh_axes`."""
        axes = {axis for row in self.rows for axis in row.axes}
        return axes | {"ep"} if "tp" in axes else axes


def _only_looked_up(weight: Weight) -> bool:
    uses = {name for op in weight.users for name, v in op.named_operands() if v is weight}
    return all(isinstance(op, Embedding) for op in weight.users) and uses == {"table"}


def read_plan(path: str) -> list[Row]:
    """The rows of a file: lines of text (# begins a comment), or JSON with a Hugging Face tp_plan.

    JSON is a tp_plan itself or a config.json that has one. The name `DEFAULT` is no file.
    """
    if path == DEFAULT:
        return megatron()
    if path.endswith(".json"):
        return _from_json(path)
    try:
        with open_file(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Error(
            f"cannot read the plan {path}: {error}; a plan is megatron, or a file of rows such as "
            "*.q_proj.weight 0@tp"
        ) from None
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if line == DEFAULT:
            rows += megatron()
        elif line:
            rows.append(replace(row(line, f"{path}:{number}"), must_fit=True))
    if not rows:
        raise Error(f"the plan {path} has no rows; write some such as *.q_proj.weight 0@tp")
    return rows


def _from_json(path: str) -> list[Row]:
    table = read_object(Path(path), "the plan")
    if not table:
        raise Error(f"the plan {path} is not a table of module patterns")
    plan = tp_plan_in(table, path)
    if plan is None and "model_type" in table:
        raise Error(f"{path} has no tp_plan (base_model_tp_plan); give another plan, or megatron")
    # a tp_plan of a base model omits the ends of the whole model: they get the default rows
    ends = [r for r in megatron() if r.tables or any(f"{end}." in r.pattern for end in ENDS)]
    return [*styled_rows(plan or table, path), *ends]


# -- tensor-parallel plans of Hugging Face transformers


_KEYS = ("base_model_tp_plan", "tp_plan")


class _Style(NamedTuple):
    """The meaning of a style for the matrices of a module and for its bias."""

    weight: str
    bias: str
    stacked: str  # for parameters of [experts, out, in]


_COLUMN = _Style("0@tp", "0@tp", "0@ep, 1@tp")
_ROW = _Style("1@tp", "replicated", "0@ep, 2@tp")
_REPLICATED = _Style("replicated", "replicated", "replicated")
# None: what the style does to activations follows from the splits of weights here.
_STYLES: dict[str, _Style | None] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), _COLUMN),
    **dict.fromkeys(("local_colwise", "local_packed_colwise"), _COLUMN),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"), _ROW),
    **dict.fromkeys(("local_rowwise", "local_packed_rowwise"), _ROW),
    "embedding_rowwise": _Style("0@tp", "replicated", "replicated"),
    "embedding_colwise": _Style("1@tp", "replicated", "replicated"),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce"), _REPLICATED),
    **dict.fromkeys(("sequence_parallel", "mla_kv_a_proj"), _REPLICATED),
    **dict.fromkeys(("all_reduce", "gather", "local", "local_params"), None),
    **dict.fromkeys(("moe_identity_expert", "moe_tp_experts"), None),
}
# The parameters of all experts of a layer: their names there, and in models of irc.
_STACKED = {
    "gate_up_proj": ("gate", "up", "gate_up_proj"),
    "gate_proj": ("gate", "gate_proj"),
    "up_proj": ("up", "up_proj"),
    "down_proj": ("down", "down_proj"),
}


def tp_plan_in(config: dict[str, Any], path: str) -> dict[str, str] | None:
    """The tp_plan in the content of a config.json, if any; `path` is for messages."""
    for key in _KEYS:
        plan = config.get(key)
        if plan is not None and not isinstance(plan, dict):
            raise Error(
                f"{path}: {key} is {plan!r}, but it must be a table from modules to styles, such "
                'as {"layers.*.mlp.down_proj": "rowwise"}'
            )
        if plan:
            return cast("dict[str, str]", plan)
    return None


def styled_rows(table: dict[str, Any], path: str) -> list[Row]:
    """The rows of a table from modules to styles; `path` is for messages."""
    return [
        replace(row, entry=f"{module}: {style}")
        for module, style in table.items()
        for row in _styled(module, style, path)
    ]


def _styled(module: str, name: Any, path: str) -> Iterator[Row]:
    if not isinstance(name, str) or name not in _STYLES:
        hint = did_you_mean(name, _STYLES) if isinstance(name, str) else ""
        raise Error(f"the plan {path} has an unknown style {name!r} for {module}{hint}")
    style, source = _STYLES[name], f"{path}: {name}"
    if style is None:
        return
    parent, _, last = module.rpartition(".")
    if parent.endswith("experts") and last in _STACKED:
        for own in _STACKED[last]:
            yield row(f"*experts.{own} {style.stacked}", source)
    # a plan names modules from the base model on, which is often a part of the traced one
    for prefix in ("", "*."):
        yield row(f"{prefix}{module}.weight* {style.weight}", source)
        yield row(f"{prefix}{module}.bias* {style.bias}", source)
        if style is not _ROW:
            yield row(f"{prefix}{module} {style.weight}", source)  # a parameter by itself
