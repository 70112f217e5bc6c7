"""Which passes a compilation runs, where the user does not say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core import Module
from ..errors import Error
from ..given import check_path
from ..mesh import Mesh

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..pipeline import Pass

_GLOBAL = ("inline", "shard", "rewrite-embeddings", "pipeline", "localize")
_IN_TEXT = {  # the options beside --mesh, and what they are in the text of a pipeline
    "plan": "shard{plan=...}",
    "sequence": "shard{sequence=true}",
    "embedding": "rewrite-embeddings{scheme=...}",
    "outside": "rewrite-embeddings{policy=...}",
    "next_tokens": "next-tokens",
}


@dataclass(frozen=True)
class Parallel:
    """How a module is spread over ranks; empty texts leave the choice to the passes.

    `mesh`: axes and sizes, as in "tp=2,pp=2" or {"tp": 2}. `plan`: megatron, or a file of rows or a
    tp_plan. `sequence`: keep activations split over their tokens between blocks. `embedding`: the
    scheme of embeddings, auto by the cost model; without one the table's rows are split. `outside`:
    what ids outside a table give: zero, clamp, row:k or error. `next_tokens`: a language model
    gives its likeliest tokens in place of logits.
    """

    mesh: str | Mapping[str, int] = ""
    plan: str = ""
    sequence: bool = False
    embedding: str = ""
    outside: str = ""
    next_tokens: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Parallel:
        """What options of a compilation say about ranks."""
        names = [field.name for field in fields(cls)]
        given = {name: options[name] for name in names if name in options}
        if given.get("plan"):
            check_path("plan", given["plan"])
            given["plan"] = os.fspath(given["plan"])
        return cls(**given)


def chosen_pipeline(
    backend: Backend, module: Module, parallel: Parallel, given: str | None, folder: Path | None
) -> str:
    """The text of the passes to run; the module gets the mesh that was asked for."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import Pipeline, parse_pipeline

    if parallel.mesh:
        _set_mesh(module, Mesh.parse(parallel.mesh))
    _check_effect(module, parallel, given)
    if given is not None:
        return given
    if module.local:
        kept = parse_pipeline(backend.sharded_pipeline).passes
        return str(Pipeline(tuple(p for p in kept if p.name not in _GLOBAL)))
    if module.mesh.ranks == 1:
        chosen = parse_pipeline(backend.default_pipeline).passes
        if parallel.outside:
            chosen = _behind_inline(chosen, "rewrite-embeddings", **_policy(parallel))
    else:
        wanted = parse_pipeline(backend.sharded_pipeline)
        found = (_filled(pass_, module, parallel, folder) for pass_ in wanted)
        chosen = tuple(pass_ for pass_ in found if pass_ is not None)
    if parallel.next_tokens:
        chosen = _behind_inline(chosen, "next-tokens")
    return str(Pipeline(chosen))


def _behind_inline(chosen: tuple[Pass, ...], added: str, **options: Any) -> tuple[Pass, ...]:
    """The passes with one more in front, for a module without calls: it may add results to a
    function, which callers would not know of."""
    from ..pipeline import parse_pipeline

    inline, new = parse_pipeline(f"inline, {added}")
    rest = chosen[1:] if chosen[:1] and chosen[0].name == "inline" else chosen
    return (inline, replace(new, **options), *rest)


def _check_effect(module: Module, parallel: Parallel, given: str | None) -> None:
    """An Error about an option that would do nothing."""
    for name in _IN_TEXT:
        option = f"--{name.replace('_', '-')}"
        why = _no_effect(module, name, option, given) if getattr(parallel, name) else ""
        if why:
            raise Error(why)


def _no_effect(module: Module, name: str, option: str, given: str | None) -> str:
    """Why an option does nothing for a module, if that is so."""
    in_vain = f"so {option} has no effect; leave it out"
    if given is not None:
        text = _IN_TEXT[name]
        return f"--pipeline says which passes run, and {option} none of them; write {text} there"
    if module.local:
        return f"the module is what one rank runs already, {in_vain}"
    if module.mesh.ranks == 1 and name in ("plan", "embedding"):
        return f"one rank holds all weights whole; {option} is for several"
    if module.mesh.ranks == 1 and name == "sequence":
        return f"one rank has all tokens; {option} is for several"
    if name in ("plan", "sequence") and _is_sharded(module):
        return f"the module is split over its ranks already, {in_vain}"
    return ""


def _is_sharded(module: Module) -> bool:
    return any(value.type.sharded for op in module.ops() for value in op.results)


def _set_mesh(module: Module, mesh: Mesh) -> None:
    if module.mesh.axes and module.mesh != mesh:
        raise Error(f"the module is for the mesh ({module.mesh}), not for ({mesh})")
    module.mesh = mesh


def _filled(pass_: Pass, module: Module, parallel: Parallel, folder: Path | None) -> Pass | None:
    """The pass with the options that were asked for; None where it has nothing to do."""
    match pass_.name:
        case "shard":
            plan = parallel.plan or _plan_of(folder)
            options: dict[str, Any] = {"mesh": str(module.mesh), "sequence": parallel.sequence}
            options |= {"plan": plan} if plan else {}
            return None if _is_sharded(module) else replace(pass_, **options)
        case "rewrite-embeddings":
            return _lookups(pass_, parallel)
        case "pipeline":
            staged = "pp" in module.mesh.names and module.mesh.size("pp") > 1
            return replace(pass_, stages=module.mesh.size("pp")) if staged else None
        case _:
            return pass_


def _lookups(pass_: Pass, parallel: Parallel) -> Pass | None:
    """The pass with what was asked for; without a scheme, tables are read where they lie."""
    if not parallel.embedding and not parallel.outside:
        return None
    options: dict[str, Any] = {"scheme": parallel.embedding or "keep"}
    return replace(pass_, **options, **_policy(parallel))


def _policy(parallel: Parallel) -> dict[str, Any]:
    """The option of `rewrite-embeddings` about ids outside a table."""
    from ..passes.embeddings.policy import Policy

    if not parallel.outside:
        return {}
    Policy.parse(parallel.outside, "--outside")
    return {"policy": parallel.outside}


def _plan_of(folder: Path | None) -> str:
    """The config.json of a checkpoint folder, where it has a tp_plan."""
    path = None if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return ""
    from ..passes.shard.plan import tp_plan_in

    try:
        config: Any = json.loads(path.read_bytes())
    except ValueError:
        return ""
    found = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
    return str(path) if tp_plan_in(found, str(path)) else ""
