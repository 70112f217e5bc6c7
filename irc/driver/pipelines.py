"""The default pipeline of a compilation, from its options about ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..argument_checks import check_path
from ..errors import Error
from ..ir.core import Module
from ..ir.mesh import Mesh
from .options import selected
from .quantization import Quantization, with_quantization
from .sources import Source

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..pipeline import Pass

_GLOBAL = ("inline", "shard", "rewrite-embeddings", "pipeline", "localize")
_IN_TEXT = {  # the options beside --mesh, as the text of a pipeline
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
    tp_plan. `sequence`: shard activations over their tokens between blocks. `embedding`: the scheme
    of embeddings, auto by the cost model; without one the table's rows are sharded. `outside`: the
    policy of out-of-range ids: zero, clamp, row:k or error. `next_tokens`: a language model returns
    its likeliest tokens, not logits.
    """

    mesh: str | Mapping[str, int] = ""
    plan: str = ""
    sequence: bool = False
    embedding: str = ""
    outside: str = ""
    next_tokens: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Parallel:
        """The options of a compilation that are about ranks."""
        found = selected(options, *(field.name for field in fields(cls)))
        if found.get("plan"):
            check_path("plan", found["plan"])
            found["plan"] = os.fspath(found["plan"])
        return cls(**found)


def chosen_pipeline(backend: Backend, source: Source, options: Mapping[str, Any]) -> str:
    """The text of the passes to run; the module gets the mesh of the options."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import Pipeline, parse_pipeline

    module, pipeline = source.module, options.get("pipeline")
    parallel, quantization = Parallel.of(options), Quantization.of(options)
    if parallel.mesh:
        mesh = Mesh.parse(parallel.mesh)
        if module.mesh.axes and module.mesh != mesh:
            raise Error(f"the module is for the mesh ({module.mesh}), not for ({mesh})")
        module.mesh = mesh
    _check_effect(module, parallel, pipeline)
    quantization.check_effect(module, pipeline)
    if pipeline is not None:
        return pipeline
    if module.local:
        kept = parse_pipeline(backend.sharded_pipeline).passes
        return str(Pipeline(tuple(p for p in kept if p.name not in _GLOBAL)))
    if module.mesh.ranks == 1:
        chosen = parse_pipeline(backend.default_pipeline).passes
        if parallel.outside:
            chosen = _behind_inline(chosen, "rewrite-embeddings", **_policy(parallel))
    else:
        found = [
            _filled(each, source, parallel) for each in parse_pipeline(backend.sharded_pipeline)
        ]
        chosen = tuple(filter(None, found))
    if quantization.wanted:
        plan = parallel.plan or _plan_of(source)
        chosen = with_quantization(
            chosen, quantization.as_pass(plan, quantization.cache_scales(source))
        )
    if parallel.next_tokens:
        chosen = _behind_inline(chosen, "next-tokens")
    return str(Pipeline(chosen))


def _behind_inline(chosen: tuple[Pass, ...], added: str, **options: Any) -> tuple[Pass, ...]:
    """The passes behind `inline` and `added`, which may add results to functions and so must not
    meet calls of them."""
    from ..pipeline import parse_pipeline

    inline, new = parse_pipeline(f"inline, {added}")
    rest = chosen[1:] if chosen[:1] and chosen[0].name == "inline" else chosen
    return (inline, replace(new, **options), *rest)


def _check_effect(module: Module, parallel: Parallel, pipeline: str | None) -> None:
    """An Error about the first option without effect."""
    for name, text in _IN_TEXT.items():
        if not getattr(parallel, name):
            continue
        option = f"--{name.replace('_', '-')}"
        if pipeline is not None:
            why, instead = "--pipeline names the passes", f"write {text} there"
        elif module.local:
            why, instead = "the module is in the local view already", "leave it out"
        elif module.mesh.ranks == 1 and name in ("plan", "embedding", "sequence"):
            what = "has all tokens" if name == "sequence" else "holds all weights"
            raise Error(f"one rank {what}; {option} is for several ranks")
        elif name in ("plan", "sequence") and _is_sharded(module):
            why, instead = "the module is sharded already", "leave it out"
        else:
            continue
        raise Error(f"{why}, so {option} has no effect; {instead}")


def _is_sharded(module: Module) -> bool:
    return any(value.type.sharded for op in module.ops() for value in op.results)


def _filled(pass_: Pass, source: Source, parallel: Parallel) -> Pass | None:
    """The pass with the options of the compilation; None where it has nothing to do."""
    module = source.module
    match pass_.name:
        case "shard":
            plan = parallel.plan or _plan_of(source)
            options: dict[str, Any] = {"mesh": str(module.mesh), "sequence": parallel.sequence}
            options |= {"plan": plan} if plan else {}
            return None if _is_sharded(module) else replace(pass_, **options)
        case "rewrite-embeddings":
            if not parallel.embedding and not parallel.outside:
                return None
            options = {"scheme": parallel.embedding or "keep", **_policy(parallel)}
            return replace(pass_, **options)
        case "pipeline":
            staged = "pp" in module.mesh.names and module.mesh.size("pp") > 1
            return replace(pass_, stages=module.mesh.size("pp")) if staged else None
        case _:
            return pass_


def _policy(parallel: Parallel) -> dict[str, Any]:
    """The option of `rewrite-embeddings` about out-of-range ids."""
    from ..passes.embeddings.policy import Policy

    if not parallel.outside:
        return {}
    Policy.parse(parallel.outside, "--outside")
    return {"policy": parallel.outside}


def _plan_of(source: Source) -> str:
    """The config.json of a checkpoint folder, where it has a tp_plan."""
    if source.folder is None or source.artifact is not None:
        return ""
    path = source.folder / "config.json"
    if not path.is_file():
        return ""
    from ..frontends.huggingface import read_config
    from ..passes.shard.plan import tp_plan_in

    return str(path) if tp_plan_in(read_config(source.folder), str(path)) else ""
