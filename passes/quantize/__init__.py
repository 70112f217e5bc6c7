"""`quantize`: weights become codes and scales, and inputs and caches are rounded as schemes say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from irc.errors import Error
from irc.ir.core import Module, Value, Weight
from irc.ops import Dequantize, Embedding, FusedLinear, GatedMlp
from irc.pipeline import Compilation, Pass, Stats, option, register
from irc.pipeline.options import PATHS, settings_of
from irc.quantization.schemes import SCHEMES, scheme_called
from irc.quantization.schemes import Scheme as Scheme
from irc.quantization.schemes import register_scheme as register_scheme
from irc.quantization.sites import Site, by_input, find_sites
from irc.quantization.statistics import check_observer
from irc.rewrite import permit

from ..shard.place import grouped
from ..shard.plan import DEFAULT, Plan, plan_of
from ..shared.edit import free_name
from . import auto, awq, gptq, smoothquant  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .algorithms import RESCALE, Array, Context, check_algorithms, check_statistics
from .assignment import HEAD, Assigner, Assignment, Row, Selection, is_head, read_caches, read_table
from .rewriting import (
    Activation,
    activation_of,
    check_kind,
    parse_scales,
    quantize_caches,
    quantize_input,
    quantize_weights,
    use_weight,
)

AUTO = "auto"


@register("quantize")
class QuantizeModule(Pass):
    """Quantizes the linears of a module, and with `kv` (int8 or fp8) its caches.

    `scheme` is one of those below, or auto, which chooses one per site for a `budget` such as
    "4.5 bits" or "30 dB". `table` maps globs on scopes to schemes: a JSON file, or its text; it may
    say `kv_cache_quant_algo` for `kv`.
    `include` and `exclude` are globs. Routers stay, and heads get w8a16, unless `include` or the
    table names them; with `exclude` [] all layers get the scheme. `group` inputs of a weight share
    a scale, 0 is the scheme's number. `calibration` is a folder of irc calibrate, and `observer`
    how it gives the ranges of static scales: by default mse for i8 and min-max for FP8.
    `kv_scales`, such as "k0=0.02", are those of caches without calibration. No shard that `plan`
    makes of a weight cuts a group.
    """

    view = "unsharded"
    behind = ("inline", "canonicalize", "cse")
    changes_numbers = True

    scheme: str = option(
        default="",
        help="w8a16, w4a16, fp8, ... (irc passes quantize has all), auto, or a table in JSON",
        keyword="quantize",
        metavar="SCHEME",
        takes=(*PATHS, Mapping),
        expects="the name of a scheme, the path of a JSON file, or a mapping of globs and schemes",
    )
    include: list[str] | None = option(
        default=None,
        help="a glob of layers to quantize; may be repeated (default: all)",
        metavar="GLOB",
        expects='a list of globs, such as ["*.mlp.*"]',
    )
    exclude: list[str] | None = option(
        default=None,
        help="a glob of layers to keep; may be repeated (default: routers; '' is none)",
        metavar="GLOB",
        expects='a list of globs, such as ["*.lm_head"]',
    )
    group: int = option(
        default=0,
        help="inputs of a weight that share a scale (default: as the scheme says)",
        metavar="N",
        expects="a number of inputs, such as 128",
        least=0,
    )
    kv: str = option(
        default="",
        help="keep KV caches in int8 or fp8",
        keyword="kv_cache",
        metavar="KIND",
        expects="int8 or fp8",
    )
    kv_scales: list[str] | None = None
    calibration: str = option(
        default="",
        help="statistics of irc calibrate, or the data for them: .txt, .npz or a folder of such",
        metavar="PATH",
        takes=PATHS,
    )
    table: str = ""
    budget: str = option(
        default="",
        help='for auto: "4.5 bits" per weight, or "30 dB"',
        metavar="TEXT",
        expects='bits per weight or decibels, such as "4.5 bits"',
    )
    observer: str = option(
        default="",
        help="range of a static scale: min-max (FP8's default), mse (INT8's), percentile[:99.9], "
        "entropy",
        metavar="NAME",
        expects="min-max, percentile, entropy or mse",
    )
    plan: str = DEFAULT

    def configured(self, compilation: Compilation) -> Pass | None:
        asked = settings_of(type(self)).keys() & compilation.options.keys()
        if not asked:
            return self
        if not {"quantize", "kv_cache"} & asked:
            option = next(name for name in compilation.options if name in asked)
            flag = settings_of(type(self))[option].flag
            raise Error(f"{flag} has no effect without --quantize SCHEME")
        options: dict[str, Any] = dict(compilation.options)
        scheme, calibration = options.get("quantize", ""), options.get("calibration", "")
        if isinstance(scheme, Mapping):
            named = json.dumps(dict(cast("Mapping[str, Any]", scheme)))
        else:
            named = os.fspath(cast("str | os.PathLike[str]", scheme))
        is_table = isinstance(scheme, Mapping) or named.endswith(".json")
        options["quantize"] = "" if is_table else named
        options["calibration"] = str(Path(calibration)) if calibration else ""
        filled = super().configured(replace(compilation, options=options))
        assert isinstance(filled, QuantizeModule)
        filled = replace(
            filled, table=named if is_table else "", plan=plan_of(compilation) or DEFAULT
        )
        kind = "" if calibration else filled.caches
        scales = compilation.cache_scales(kind).items() if kind else ()
        listed = [f"{name}={scale!r}" for name, scale in scales]
        return replace(filled, kv_scales=listed or None)

    @classmethod
    def known_values(cls) -> dict[str, dict[str, str]]:
        return {"scheme": {scheme.name: scheme.doc for scheme in SCHEMES.values()}}

    def run(self, module: Module, stats: Stats) -> None:
        self.check()
        if not (self.scheme or self.table or self.kv):
            return
        _check_view(module)
        changes = Stats()
        context = Context(module, changes, self.calibration, self.observer, self.budget, self.plan)
        if self.scheme or self.table:
            self._quantize(context)
        if self.caches:
            changes.count(
                "caches", quantize_caches(self.caches, parse_scales(self.kv_scales or ()), context)
            )
        changes.notes = grouped(changes.notes)
        stats.update(changes)

    def check(self) -> None:
        """An Error about options that are wrong, or that have no effect."""
        if self.group < 0:
            raise Error(f"quantize: group is {self.group}; give a number of inputs, such as 128")
        if bool(self.budget) != (self.scheme == AUTO):
            raise Error('quantize: scheme "auto" and a budget such as "4.5 bits" belong together')
        if self.group and self.scheme in ("", AUTO):
            why = "is for one scheme; rows of a table have their own, and auto takes 128"
            raise Error(f"quantize: group has no effect here, it {why}")
        if not (self.scheme or self.table) and (self.include or self.exclude) is not None:
            raise Error("quantize: include and exclude have no effect without a scheme")
        if self.budget:
            auto.Budget.parse(self.budget)
        check_observer(self.observer)
        if self.caches:
            check_kind(self.caches)
        elif self.kv_scales:
            raise Error("quantize: kv_scales have no effect without kv")
        parse_scales(self.kv_scales or ())

    @property
    def caches(self) -> str:
        """The kind of caches that are asked for, by an option or in the table."""
        return self.kv or (read_caches(self.table) if self.table else "")

    def _quantize(self, context: Context) -> None:
        """Quantize the weights of the chosen sites, and the inputs where their schemes say so."""
        assigned = self._assigned(context)
        check_algorithms(assigned, context)
        check_statistics(assigned, context)
        factors = _rescale(assigned, context)
        quantize_weights(assigned, context)
        inputs: dict[tuple[Value, Activation], list[Assignment]] = {}
        for assignment in assigned:
            activation = activation_of(assignment, context)
            if activation is not None:
                key = assignment.site.op.operands[0], activation
                inputs.setdefault(key, []).append(assignment)
        for (_, activation), group in inputs.items():
            quantize_input(group, activation, factors.get(group[0].site.name), context)
        context.stats.count("products", len(assigned))
        context.stats.count("inputs", len(inputs))

    def _assigned(self, context: Context) -> list[Assignment]:
        """The sites to quantize, each with its scheme and blocks."""
        module, stats = context.module, context.stats
        sites = find_sites(module)
        if not sites and any(isinstance(op, Dequantize) for op in module.ops()):
            raise Error(
                "quantize: the weights of the module are quantized already; leave it out, or "
                "compile the source that they were made from"
            )
        if not sites:
            raise Error("quantize: the module has no product of activations and a float weight")
        selection = self._selection()
        rows = selection.rows(sites, list(module.weights))
        for site in sites:
            row = rows.get(site.name)
            if row is None:
                kept = f"{site.name} stays {site.weight.type.dtype}"
                stats.explain(f"{kept}: {selection.why_not(site)}")
            elif row.scheme is not None and is_head(site):
                stats.explain(f"{site.name}, a head: {row.scheme.name}")
        if self.scheme == AUTO:
            open = [site for site in sites if site.name in rows and rows[site.name].scheme is None]
            chosen = auto.choose_schemes(open, context)
            rows |= {name: Row(name, scheme) for name, scheme in chosen.items()}
        assigner = Assigner(Plan.of(self.plan, module, stats))
        assigned: list[Assignment] = []
        for site in _apart([site for site in sites if site.name in rows], module):
            row = rows[site.name]
            if row.scheme is not None and permit(self.name, site.op):
                assigned.append(assigner.assign(site, row.scheme, row.group))
        return assigned

    def _selection(self) -> Selection:
        scheme = scheme_called(self.scheme) if self.scheme not in ("", AUTO) else None
        table = read_table(self.table) if self.table else []
        base = Row("*", scheme, self.group) if self.scheme else None
        return Selection(base, self.include, self.exclude, table)


def _check_view(module: Module) -> None:
    if module.local:
        raise Error("the module is in the local view already; quantize comes before shard")
    for op in module.ops():
        if any(value.type.sharded for value in op.results):
            raise Error("the module is sharded already; quantize comes before shard")
        if isinstance(op, (GatedMlp, FusedLinear)) and isinstance(op.operands[1], Weight):
            what = "gated feed-forwards" if isinstance(op, GatedMlp) else "linears"
            raise Error(
                f"the {what} are fused already; compile the source anew, or put "
                f'expand{{ops=["{op.opname}"]}} before quantize'
            ).at(op)


def _apart(sites: list[Site], module: Module) -> list[Site]:
    """The sites with weights of their own: one that others read too is two from now on."""
    ops = {site.op for site in sites}
    copies: dict[Weight, Weight] = {}
    separate: list[Site] = []
    for site in sites:
        old = site.weight
        if old not in copies and not _readers(old) <= ops:
            tied = any(isinstance(user, Embedding) for user in old.users)
            name = HEAD if tied else f"{site.name}.copy.weight"
            name = free_name(name, module.weights)
            copies[old] = module.add_weight(Weight(old.type, name, old.ref))
        if old in copies:
            use_weight(site, copies[old])
            operand = site.op.operands[1]
            site = replace(site, weight=copies[old], weight_operand=operand)
        separate.append(site)
    return separate


def _readers(weight: Weight) -> set[object]:
    """The operations that read a weight, as it is or transposed."""
    readers: set[object] = set()
    for op in weight.users:
        readers |= set(op.result.users) if op.opname == "transpose" else {op}
    return readers


def _rescale(assigned: list[Assignment], context: Context) -> dict[str, Array]:
    """The factors by which the inputs of sites were divided, by name."""
    if context.statistics is None:
        return {}
    by_site = {
        assignment.site.op: assignment
        for assignment in assigned
        if assignment.scheme.algorithm in RESCALE
    }
    factors: dict[str, Array] = {}
    for sites in by_input(assignment.site for assignment in by_site.values()):
        group = [by_site[site.op] for site in sites]
        for algorithm in dict.fromkeys(assignment.scheme.algorithm for assignment in group):
            same = [assignment for assignment in group if assignment.scheme.algorithm == algorithm]
            scaled = RESCALE[algorithm](same, context)
            if scaled is not None:
                factors |= {assignment.site.name: scaled for assignment in same}
    return factors
