"""Sharding plans: rows of patterns and axes, of which the first that matches a name decides.

`*.q_proj.weight 0@tp` shards the rows of every weight with such a name over tp; `replicated`
replicates it; `0@tp, 1@ep` shards two dimensions. Arguments of the main function are matched as
well. A tensor-parallel plan of Hugging Face transformers has a style per module or parameter. The
word `auto` leaves all other weights to `choose`, which looks at the operations, not at names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from irc.errors import Error, did_you_mean
from irc.files import open_file
from irc.ir.core import Module, Value, Weight
from irc.ir.types import Axes
from irc.json_files import read_object
from irc.pipeline import Compilation, Stats

from ..shared.parameters import Product, weights_of
from .choose import choose, is_end

_SPLIT = re.compile(r"(\d+)@([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True)
class Row:
    """One row: a pattern, the axes of dimensions, and the source of the row.

    A row that a user wrote must match something in the model: `must_fit`. Of the rows of one
    `entry` of a tp_plan one must.
    """

    pattern: str
    splits: tuple[tuple[int, Axes], ...]
    source: str
    must_fit: bool = False
    entry: str = ""

    def fits(self, name: str) -> bool:
        """Whether a weight or argument has such a name."""
        return fnmatchcase(name, self.pattern)

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


def find_row(rows: list[Row], name: str) -> Row | None:
    """The first row that matches a name."""
    return next((row for row in rows if row.fits(name)), None)


DEFAULT = "auto"
WORDS = (DEFAULT, "megatron")  # the second is an older name


class Rest(Enum):
    """What becomes of weights that no row is for."""

    REPLICATED = "replicated"
    CHOSEN = "chosen"
    ENDS_CHOSEN = "tables and heads are chosen"


def plan_of(compilation: Compilation) -> str:
    """The plan that a compilation names, else the config.json with a tp_plan, else ""."""
    if "plan" in compilation.options:
        plan: str | os.PathLike[str] = compilation.options["plan"]
        return os.fspath(plan)
    path = compilation.config_path
    return path if tp_plan_in(dict(compilation.config), path) else ""


@dataclass
class Plan:
    """The rows of a plan for a module; `origins` has the old names of renamed weights.

    `chosen` has rows by name, for weights of products and lookups that no other row is for.
    """

    module: Module
    rows: list[Row]
    stats: Stats
    origins: dict[str, str] = field(default_factory=dict[str, str])
    chosen: dict[str, Row] = field(default_factory=dict[str, Row])
    rest: Rest = Rest.REPLICATED

    @staticmethod
    def of(text: str, module: Module, stats: Stats) -> Plan:
        """A plan for a module, which has its mesh: auto, or the path of a file.

        Names of modules in a tp_plan are about matrices [out, in]. One that a product takes as
        [in, out] gets a row of its own, with these dimensions exchanged; rows that a user wrote are
        taken as they are.
        """
        rows, rest = read_plan(text)
        turned: dict[str, Row] = {}
        for product in filter(None, map(Product.of, module.ops() if rows else ())):
            if product.inputs > product.outputs:
                continue
            dims = {product.inputs: product.outputs, product.outputs: product.inputs}
            for weight in weights_of(product.parameter) or ():
                row = find_row(rows, weight.name)
                if row and not row.must_fit and weight.type.ndim == product.parameter.type.ndim:
                    splits = tuple((dims.get(dim, dim), axes) for dim, axes in row.splits)
                    turned[weight.name] = replace(row, pattern=escape(weight.name), splits=splits)
        plan = Plan(module, [*turned.values(), *rows], stats, rest=rest)
        if rest is not Rest.REPLICATED:
            layouts = choose(plan, None if rest is Rest.CHOSEN else is_end)
            plan.chosen = {
                name: Row(escape(name), splits, f"{DEFAULT}: {why}")
                for name, (splits, why) in layouts.items()
            }
        return plan

    def origin(self, name: str) -> str:
        """The name that a weight had at first."""
        return self.origins.get(name, name)

    def row_of(self, value: Value) -> Row | None:
        """The row of a weight, or of an argument."""
        if not isinstance(value, Weight):
            return find_row(self.rows, str(value.name))
        return self.row_called(self.origin(value.name))

    def row_called(self, name: str) -> Row | None:
        """The row of a weight by the name that it had at first."""
        return find_row(self.rows, name) or self.chosen.get(name)

    def group_size(self, name: str, dim: int) -> int:
        """The number of ranks over which it shards a dimension of the weights of a name."""
        row, used = self.row_called(self.origin(name)), dict[int, Axes]()
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
        axes |= {"tp"} if self.rest is not Rest.REPLICATED else set()
        return axes | {"ep"} if "tp" in axes else axes


def read_plan(path: str) -> tuple[list[Row], Rest]:
    """The rows of a file: lines of text (# begins a comment), or JSON with a Hugging Face tp_plan.

    JSON is a tp_plan itself or a config.json that has one: it omits the ends of the whole model.
    The names in `WORDS` are no files.
    """
    if path in WORDS:
        return [], Rest.CHOSEN
    if path.endswith(".json"):
        return _from_json(path)
    try:
        with open_file(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Error(
            f"cannot read the plan {path}: {error}; a plan is auto, or a file of rows such as "
            "*.q_proj.weight 0@tp"
        ) from None
    rows: list[Row] = []
    rest = Rest.REPLICATED
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if line in WORDS:
            rest = Rest.CHOSEN
        elif line:
            rows.append(replace(row(line, f"{path}:{number}"), must_fit=True))
    if not rows and rest is Rest.REPLICATED:
        raise Error(f"the plan {path} has no rows; write some such as *.q_proj.weight 0@tp")
    return rows, rest


def _from_json(path: str) -> tuple[list[Row], Rest]:
    table = read_object(Path(path), "the plan")
    if not table:
        raise Error(f"the plan {path} is not a table of module patterns")
    plan = tp_plan_in(table, path)
    if plan is None and "model_type" in table:
        raise Error(f"{path} has no tp_plan (base_model_tp_plan); give another plan, or auto")
    return styled_rows(plan or table, path), Rest.ENDS_CHOSEN


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
