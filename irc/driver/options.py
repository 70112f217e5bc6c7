"""The options of a compilation: those of irc itself, of the passes and of the backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ..argument_checks import check_kind, with_comma
from ..errors import Error, did_you_mean
from ..pipeline.options import Setting, option, settings_of
from .sources import Source, SourceOptions

if TYPE_CHECKING:
    from ..backends.base import Backend


@dataclass(frozen=True)
class CompileOptions(SourceOptions):
    """The options of a compilation that belong to no pass and no backend."""

    backend: str | None = option(
        None,
        "what to compile for: onnx, cuda, tensorrt-rtx, tensorrt, reference (default: that of an "
        "artifact, else onnx)",
        metavar="NAME",
        expects='its name, such as "onnx"',
    )
    pipeline: str | None = option(
        None,
        'the passes in place of the backend\'s own, or "default, after cse: my-pass" (before '
        "NAME: PASS and without NAME likewise)",
        metavar="TEXT",
        expects='the passes as text, such as "cse, dce" or "default, after cse: my-pass"',
        join=with_comma,
    )
    mesh: str | Mapping[str, int] = option(
        "",
        "ranks by axes (pp, dp, cp, ep, tp): tp=2,pp=2",
        metavar="AXES",
        takes=(str, Mapping),
        expects='axes and sizes, such as "tp=2"',
        join=with_comma,
    )
    bundle: bool = option(False, "copy the weights into the artifact")
    prove: bool = option(
        False, "prove that passes keep what the model computes; certificate.json says how far"
    )
    weight_errors: bool = option(
        False, "measure and print the error of every quantized weight, which reads all of them"
    )


IN_PYTHON = ("instruments", "progress")  # which the command line has other options for


def pass_settings() -> dict[str, Setting]:
    """The options of the registered passes, by keyword."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import PASSES

    return settings_of(*PASSES.values())


def backend_settings(*names: str, which: str = "options") -> dict[str, tuple[Setting, list[str]]]:
    """The options of some backends, with the names of those that have them.

    `which` is "options", of `irc.compile`, or "load_options", of `irc.load`.
    """
    from ..backends import get

    declared: dict[str, tuple[Setting, list[str]]] = {}
    for name in dict.fromkeys(names):
        defaults: object = getattr(get(name), which)
        for keyword, setting in settings_of(type(defaults)).items():
            first, users = declared.setdefault(keyword, (setting, []))
            if replace(first, owner=setting.owner) != setting:
                raise Error(f"{users[0]} and {name} both declare the option {keyword}")
            users.append(name)
    return declared


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set, those of `engine` among the others; an Error about a wrong one."""
    from ..backends import OWN

    options = dict(options)
    engine: Any = options.pop("engine", None) or dict[str, Any]()
    check_kind("engine", engine, Mapping, "a mapping, such as {'weights': 'inside'}")
    options |= engine
    settings = settings_of(CompileOptions)
    name = settings["backend"].checked(options.get("backend"))
    settings |= pass_settings()
    if options.keys() - settings.keys() - {*IN_PYTHON}:
        declared = backend_settings(*OWN, *[name] * bool(name))
        settings |= {keyword: setting for keyword, (setting, _) in declared.items()}
    checked: dict[str, Any] = {}
    for keyword, value in options.items():
        if keyword in IN_PYTHON:
            checked[keyword] = value
        elif keyword not in settings:
            near = did_you_mean(str(keyword), settings)
            raise Error(f"irc.compile has no option {keyword}{near}")
        elif value is not None:
            checked[keyword] = settings[keyword].checked(value)
    return checked


def source_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that decide how a source is read."""
    return {name: options[name] for name in settings_of(SourceOptions) if name in options}


def begin(options: Mapping[str, Any]) -> None:
    """Let the backend that is named prepare for a source, which may need what its options load."""
    from ..backends import get

    if name := options.get("backend"):
        get(name).begin(options)


def chosen_backend(source: Source, options: Mapping[str, Any]) -> Backend:
    """The backend with its options; an artifact that is compiled again keeps both by default."""
    from ..backends import DEFAULT, OWN, get

    before = source.artifact if source.kind == "artifact" else None
    name = options.get("backend") or (before.backend if before else DEFAULT)
    backend = get(name)
    own = settings_of(type(cast("object", backend.options)))
    general = {*settings_of(CompileOptions), *pass_settings(), *IN_PYTHON}
    for keyword in (keyword for keyword in options if keyword not in {*general, *own}):
        setting, names = backend_settings(*OWN)[keyword]
        raise Error(
            f"the backend {name} has no option {keyword}: {setting.flag} is for --backend "
            f"{' or '.join(names)}"
        )
    chosen = {keyword: value for keyword, value in options.items() if keyword in own}
    return backend.configured({**(backend.remembered(before) if before else {}), **chosen})
