"""The pipeline of a compilation: that of the backend, its passes filled with the options, or that
of a text, which may change the backend's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import Error
from ..ir.mesh import Mesh
from ..pipeline import PASSES, Compilation, Pass, Pipeline, parse_pipeline
from ..pipeline.options import Setting, settings_of
from ..pipeline.text import DEFAULT, extends_default
from .options import pass_settings
from .sources import Source

if TYPE_CHECKING:
    from ..backends.base import Backend


def chosen_pipeline(backend: Backend, source: Source, options: Mapping[str, Any]) -> Pipeline:
    """The passes to run; the module gets the mesh of the options."""
    module, text = source.module, options.get("pipeline", DEFAULT)
    if options.get("mesh"):
        mesh = Mesh.parse(options["mesh"])
        if module.mesh.axes and module.mesh != mesh:
            raise Error(f"the module is for the mesh ({module.mesh}), not for ({mesh})")
        module.mesh = mesh
    compilation = _compilation(source, options)
    for keyword in compilation.options:
        _check_effect(pass_settings()[keyword], compilation, not extends_default(text))
    return parse_pipeline(text, lambda: _of_backend(backend, compilation))


def _of_backend(backend: Backend, compilation: Compilation) -> list[Pass]:
    """The passes of the backend, and those that the options ask for besides."""
    module = compilation.module
    several = module.local or module.mesh.ranks > 1
    listed = parse_pipeline(backend.sharded_pipeline if several else backend.default_pipeline)
    kept = [step for step in listed if not module.local or step.view == "any"]
    passes = [configured for old in kept if (configured := old.configured(compilation)) is not None]
    for cls in PASSES.values():
        asked = settings_of(cls).keys() & compilation.options.keys()
        if asked and not any(isinstance(step, cls) for step in listed):
            passes = _added(passes, cls, compilation)
    return passes


def _compilation(source: Source, options: Mapping[str, Any]) -> Compilation:
    """The options of passes that are set, and what the checkpoint says beside its weights."""
    from ..frontends.huggingface.quantized import cache_scales

    names = [name for name in pass_settings() if options.get(name) not in (None, "", 0, {})]
    chosen = {name: options[name] for name in names}
    if source.folder is None or source.artifact is not None:
        return Compilation(source.module, chosen)
    scales = partial(cache_scales, source.folder)
    return Compilation(source.module, chosen, source.config, source.config_path, scales)


def _added(passes: list[Pass], cls: type[Pass], compilation: Compilation) -> list[Pass]:
    """The passes with one that the options ask for, behind those that it has to follow.

    It may add results to functions and so must not meet calls of them: `inline` comes first.
    """
    names = [step.name for step in passes]
    if not compilation.module.local and "inline" not in names:
        return _added([*parse_pipeline("inline"), *passes], cls, compilation)
    at = 1 + max((names.index(name) for name in cls.behind if name in names), default=-1)
    new = cls().configured(compilation)
    return passes if new is None else [*passes[:at], new, *passes[at:]]


def _check_effect(setting: Setting, compilation: Compilation, is_text: bool) -> None:
    """An Error about an option of a pass that has no effect here."""
    module, view, flag = compilation.module, setting.owner.view, setting.flag
    if is_text:
        why, instead = "--pipeline names the passes", f"write {setting.in_pipeline} there"
    elif module.local and view != "any":
        why, instead = "the module is in the local view already", "leave it out"
    elif module.mesh.ranks == 1 and setting.option.one_rank:
        raise Error(f"one rank {setting.option.one_rank}; {flag} is for several ranks")
    elif compilation.is_sharded and view == "unsharded":
        why, instead = "the module is sharded already", "compile its source anew, or leave it out"
    else:
        return
    raise Error(f"{why}, so {flag} has no effect; {instead}")
