"""Which passes a compilation runs, where the user does not say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core import Module
from ..errors import Error
from ..mesh import Mesh

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..pipeline import Pass

_GLOBAL = ("inline", "shard", "rewrite-embeddings", "pipeline", "localize")
_IN_TEXT = {  # the options beside --mesh, and what they are in the text of a pipeline
    "plan": "shard{{plan=...}}",
    "sequence": "shard{{sequence=true}}",
    "embedding": "rewrite-embeddings{{scheme=...}}",
    "outside": "rewrite-embeddings{{policy=...}}",
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
        chosen = (*_outside(parallel), *parse_pipeline(backend.default_pipeline).passes)
    else:
        wanted = parse_pipeline(backend.sharded_pipeline)
        found = (_filled(pass_, module, parallel, folder) for pass_ in wanted)
        chosen = tuple(pass_ for pass_ in found if pass_ is not None)
    if parallel.next_tokens:
        head = [pass_ for pass_ in chosen[:1] if pass_.name == "inline"]
        chosen = (*head, *parse_pipeline("next-tokens"), *chosen[len(head) :])
    return str(Pipeline(chosen))


def _check_effect(module: Module, parallel: Parallel, given: str | None) -> None:
    """An Error about an option that would do nothing."""
    for name in _IN_TEXT:
        why = _no_effect(module, name, given) if getattr(parallel, name) else ""
        if why:
            raise Error(why.format(f"--{name.replace('_', '-')}"))


def _no_effect(module: Module, name: str, given: str | None) -> str:
    """Why an option does nothing for a module, if that is so."""
    if given is not None:
        return (
            f"--pipeline says which passes run, and {{}} none of them; write {_IN_TEXT[name]} there"
        )
    if module.local:
        return "the module is what one rank runs already, so {} has no effect; leave it out"
    if module.mesh.ranks == 1 and name in ("plan", "embedding"):
        return "one rank holds all weights whole; {} is for several"
    if module.mesh.ranks == 1 and name == "sequence":
        return "one rank has all tokens; {} is for several"
    if name in ("plan", "sequence") and _is_sharded(module):
        return "the module is split over its ranks already, so {} has no effect; leave it out"
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


def _outside(parallel: Parallel) -> Iterator[Pass]:
    """What one rank needs for ids outside a table."""
    from ..pipeline import parse_pipeline

    for pass_ in parse_pipeline("rewrite-embeddings") if parallel.outside else ():
        yield replace(pass_, **_policy(parallel))


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
