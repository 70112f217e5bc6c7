"""`compare`: the activations of two models on the same inputs, matched by scope."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..analysis.units import counted
from ..errors import Error, did_you_mean, printable
from ..generation.inputs import check_names
from ..ir.core import Module
from ..report import Columns, Report, Table
from .measure import Measure, limit_of, measure
from .points import Point, dtypes_before
from .sides import Array, Arrays, ModuleSide, ProgramSide, Side
from .transformers_side import TransformersSide

PathLike: TypeAlias = str | os.PathLike[str]
_TOKENS = 16  # of the prompt that is drawn
_GROWTH = 2.0  # see `Comparison`
_SHOWN = 20  # rows that differ


@dataclass
class Row(Measure):
    """One value of both sides, computed at `line` (`file:line`) of the first.

    A relative L2 error up to `limit` is `expected`, such as "rounding of f32"; the `cause` about
    a larger one is what explains it.
    """

    scope: str
    name: str
    label: str
    line: str
    expected: str
    limit: float
    ok: bool = True

    def facts(self) -> dict[str, Any]:
        """The fields for JSON, which has no NaN and no infinity."""
        pairs = asdict(self).items()
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in pairs}

    def __str__(self) -> str:
        return printable(f"{self.label} ({self.line})" if self.line else self.label)


@dataclass
class Comparison:
    """What `compare` found; `values` are in program order, of `total` that A has.

    A value differs if its error is beyond the rounding of the dtypes that it is computed in. With
    `equal_inputs` each was computed from the same numbers on both sides, so that an error is that
    of one step. Without, errors add up, and one differs that grows to twice those before it.
    `left_out` says which values were not compared.
    """

    a: str
    b: str
    equal_inputs: bool
    values: list[Row]
    total: int
    left_out: str = ""

    @property
    def first(self) -> Row | None:
        """The first value that differs."""
        return next((row for row in self.values if not row.ok), None)

    @property
    def not_finite(self) -> Row | None:
        """The first value with NaN or infinity at the same places of both sides."""
        return next((row for row in self.values if row.both), None)

    @property
    def ok(self) -> bool:
        """Whether all values agree."""
        return self.first is None

    def report(self, *, every: bool = False, show: str = "") -> Report:
        """Lines and tables, with a row for `every` value; `show` is the path for `irc show`."""
        names = ("a", "b", "equal_inputs", "ok", "total", "left_out")
        facts = {name: getattr(self, name) for name in names}
        facts["values"] = [row.facts() for row in self.values]
        for name in ("first", "not_finite"):
            row = getattr(self, name)
            facts[name] = None if row is None else row.facts()
        inputs = "each value on equal inputs" if self.equal_inputs else "errors add up"
        text: list[str | Table] = [printable(f"A: {self.a}\nB: {self.b}\n{inputs}")]
        for cause in dict.fromkeys(row.cause for row in self.values if row.ok):
            same = [row for row in self.values if row.ok and row.cause == cause]
            most = max(same, key=lambda row: row.relative_l2)
            error = f", relative L2 at most {most.relative_l2:.2g} ({printable(most.label)})"
            text.append(f"{counted(len(same), 'value')}: {cause}{error * bool(most.relative_l2)}")
        wrong = [row for row in self.values if not row.ok]
        shown = self.values if every else wrong[:_SHOWN]
        text += [Table([vars(row) | {"row": row} for row in shown], _COLUMNS)] * bool(shown)
        if not every and len(wrong) > _SHOWN:
            text.append(f"... and {len(wrong) - _SHOWN} more that differ (--all shows them)")
        text += [f"not compared: {printable(self.left_out)}"] if self.left_out else []
        return Report(facts, [*text, self._conclusion(show)], int(not self.ok))

    def _conclusion(self, show: str) -> str:
        row, odd = self.first, self.not_finite
        if row is None:
            both = f"; {odd.both} on both sides, first in {odd}" if odd else ""
            amount = f"{len(self.values)} of {counted(self.total, 'value')}"
            return f"no divergence in {amount}{both}"
        numbers = f"correlation {row.correlation:.3g}, relative L2 {row.relative_l2:.3g}"
        scope = f" --scope {printable(row.scope)}" if row.scope else ""
        hint = f"\nnext: irc show {show} --locs{scope}" if show else ""
        return f"first divergence: {row}: {numbers}, {row.cause}{hint}"


_COLUMNS: Columns = {
    "value": lambda row: printable(row["row"].label),
    "line": lambda row: printable(row["line"]),
    "correlation": "{correlation:.4f}",
    "relative L2": "{relative_l2:.2g}",
    "expected": "{limit:.2g}",
    "largest": "{largest:.2g}",
    "": "{cause}",
}


def compare(
    a: PathLike | Module,
    b: PathLike | Module | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    backend: str | None = None,
    against: str | None = None,
    reference: str | None = None,
    scope: str = "",
    tolerance: float | None = None,
    accumulate: bool = False,
) -> Comparison:
    """Run two models on the same inputs and compare their activations and results.

    Each is a module, its text, a script, an ONNX file, a checkpoint folder, or an artifact. An
    artifact a runs on its own backend, all else in numpy, unless `backend` (of a) or `against` (of
    b) is another one, such as "reference". Without b, it is a's module in numpy. A checkpoint
    folder b runs in transformers if that is installed, unless `reference` is "irc". Inputs are
    random without `inputs`; those of a language model are 16 tokens.

    The values of one side are kept in a temporary file each, which is read, compared and deleted
    as the other side gets there: the disk holds the activations of one side, memory a few of them.
    The other side goes on with the values of the first, so that errors do not add up, unless they
    are to `accumulate` or both sides are programs of backends. `tolerance` replaces all limits.
    """
    first = _side(a, backend)
    transformers = reference != "irc" and all(map(find_spec, ("torch", "transformers")))
    if b is None and against is None and isinstance(first, ModuleSide):
        raise Error(f"{first.title} would be compared with itself; give B, or a backend")
    if b is not None and against is None and transformers and _is_checkpoint(b):
        results = [point for point in first.points if point.result]
        second: Side = TransformersSide(Path(str(b)), results)
    elif b is not None and reference == "transformers":
        raise Error(f"transformers runs a checkpoint folder, found {b}, or it is not installed")
    else:
        second = _side(a if b is None else b, against or "reference")
    arrays = _inputs(first, second, inputs, seed)
    pairs = _matched(first, second, scope)
    equal_inputs = (first.takes or second.takes) and not accumulate
    rows, shapes = _rows(first, second, pairs, arrays, equal_inputs, tolerance)
    others = ", ".join(shapes[:3]) + ", ..." * (len(shapes) > 3)
    if not rows:
        raise Error(f"no value of one has the shape of its partner: {others}")
    values = [rows[point] for point in first.points if point in rows]
    _judge(values, equal_inputs)
    for point, row in rows.items():
        gap = max(first.apart.get(point, 0.0), second.apart.get(pairs[point], 0.0))
        if gap:
            row.relative_l2, row.cause, row.ok = gap, "ranks differ", False
    total, partners = len(_inside(first.points, scope)), {*pairs.values()}
    alone = [total - len(values) - len(shapes), len({*_inside(second.points, scope)} - partners)]
    left_out = [f"{counted(alone[0], 'value')} of A and {alone[1]} of B have no partner"]
    left_out = left_out * any(alone) + [f"{len(shapes)} of another shape: {others}"] * bool(shapes)
    return Comparison(first.title, second.title, equal_inputs, values, total, "; ".join(left_out))


def _is_checkpoint(place: object) -> bool:
    path = Path() if isinstance(place, Module) else Path(str(place))
    return (path / "config.json").is_file() and not (path / "module.irc").is_file()


def _side(place: PathLike | Module, backend: str | None) -> ModuleSide | ProgramSide:
    """What computes a module: its artifact's backend by default, else numpy."""
    from ..driver.sources import find_source

    source = find_source(place, trust=not isinstance(place, Module))
    name = f"@{place.name}" if isinstance(place, Module) else os.fspath(place)
    if backend is None and source.kind == "artifact" and source.artifact is not None:
        backend = source.artifact.backend
    if backend not in (None, "reference"):
        return ProgramSide(source.module, f"{name} on {backend}", backend)
    how = " by irc's front end" if source.kind in ("checkpoint", "script", "onnx") else ""
    return ModuleSide(source.module, f"{name}{how} in numpy")


def _inputs(
    first: ModuleSide | ProgramSide, second: Side, inputs: Mapping[str, Any] | None, seed: int
) -> Arrays:
    """The inputs by name: given ones, or random ones."""
    from ..backends.base import ports_of
    from ..generation.random_inputs import random_inputs

    ports = ports_of(first.module.main)
    if inputs is not None:
        check_names(inputs, [port.name for port in (*ports.inputs, *ports.states)])
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        for name, array in arrays.items():
            if not array.size:
                raise Error(f"input {name!r} {[*array.shape]} has no elements; nothing to compare")
        return arrays
    arrays = second.without_padding(random_inputs(first.module, seed))
    if "input_ids" in arrays and ports.states:  # a language model: all logits of a short prompt
        return {"input_ids": arrays["input_ids"][:, :_TOKENS]}
    fixed = {"attention_mask": 1, "token_type_ids": 0}
    return {n: np.full_like(x, fixed[n]) if n in fixed else x for n, x in arrays.items()}


def _inside(points: Sequence[Point], scope: str) -> list[Point]:
    return [point for point in points if not scope or f"{point.scope}.".startswith(f"{scope}.")]


def _matched(first: Side, second: Side, scope: str) -> dict[Point, Point]:
    """Points of the first inside a scope, and those of the second that have a key of theirs."""
    by_key = {key: point for point in second.points for key in reversed(point.keys)}
    pairs: dict[Point, Point] = {}
    taken = set[Point]()
    for point in _inside(first.points, scope):
        partner = next((by_key[key] for key in point.keys if key in by_key), None)
        if partner is not None and partner not in taken:
            pairs[point] = partner
            taken.add(partner)
    if not pairs:
        near = did_you_mean(scope, [point.scope for point in first.points]) if scope else ""
        raise Error(
            f"{first.title} and {second.title} have no scope and no result in common"
            f"{f' inside {scope}{near}' if scope else ''}; values are matched by scope"
        )
    return pairs


def _rows(
    first: Side,
    second: Side,
    pairs: Mapping[Point, Point],
    inputs: Arrays,
    equal_inputs: bool,
    tolerance: float | None,
) -> tuple[dict[Point, Row], list[str]]:
    """Run both sides. Rows by point of the first, of a value that is computed several times the
    worst; and the shapes that differ."""
    swapped = first.takes and not second.takes
    early, late = (second, first) if swapped else (first, second)
    partners = pairs if swapped else {b: a for a, b in pairs.items()}
    compared = [{point.value for point in side} for side in (pairs, pairs.values())]
    rows: dict[Point, Row] = {}
    shapes: dict[Point, str] = {}
    files: dict[Point, list[Path]] = {point: [] for point in partners.values()}

    def check(point: Point, array: Array) -> Array | None:
        partner = partners[point]
        if not files[partner]:
            return None
        kept: Array = np.load(files[partner][0])
        files[partner].pop(0).unlink()
        a, x, y = (point, array, kept) if swapped else (partner, kept, array)
        if (part := _common(x, y)) is None:
            shapes[a] = f"{a.label} {[*x.shape]} and {[*y.shape]}"
            return None
        b = pairs[a]
        limit, expected = limit_of(dtypes_before(a, compared[0]) | dtypes_before(b, compared[1]))
        limit = limit if tolerance is None else tolerance
        facts = vars(measure(x[part], y[part], limit))
        if a not in rows or rows[a].relative_l2 < facts["relative_l2"]:
            facts |= {"scope": a.scope, "name": a.name or a.result, "label": a.label}
            rows[a] = Row(**facts, line=a.line or b.line, expected=expected, limit=limit)
        new = np.array(array)
        new[part] = kept[part].reshape(array[part].shape)
        return new if equal_inputs else None

    with tempfile.TemporaryDirectory(prefix="irc-compare-") as folder:
        numbers = count()

        def keep(point: Point, array: Array) -> None:
            files[point].append(Path(folder) / f"{next(numbers)}.npy")
            np.save(files[point][-1], array)

        early.run(inputs, {*partners.values()}, keep)
        late.run(inputs, {*partners}, check)
    return rows, [*shapes.values()]


def _common(a: Array, b: Array) -> tuple[Any, ...] | None:
    """The part of both without what one has more at the ends of its dimensions if that is zero,
    such as padded heads; None where shapes differ otherwise than by dimensions of 1."""
    if [n for n in a.shape if n != 1] == [n for n in b.shape if n != 1]:
        return (...,)
    part = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=False))
    zero = all(np.count_nonzero(x) == np.count_nonzero(x[part]) for x in (a, b))
    return part if a.ndim == b.ndim and zero else None


def _judge(rows: Sequence[Row], equal_inputs: bool) -> None:
    """Which errors are beyond their limits."""
    before = 0.0
    for row in rows:
        base = row.limit
        row.limit = base if equal_inputs else max(base, _GROWTH * before)
        row.ok = row.relative_l2 <= row.limit
        if row.ok and row.relative_l2:
            row.cause = row.expected if row.limit <= base else "no more than before it"
        row.cause += f", {row.both} on both sides" * bool(row.both)
        before = max(before, row.relative_l2) if isfinite(row.relative_l2) else before
