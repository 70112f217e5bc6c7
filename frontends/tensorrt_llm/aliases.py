"""`aliases`: modules named tensorrt_llm and tensorrt, for as long as a script is traced."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...errors import did_you_mean
from .api import RELEASES, ROOT, find, is_module, modules, names_of, release, status, suggestion
from .context import current_session
from .errors import ScriptError
from .sources import Definitions, source_spec
from .torch_ops import register

_TENSORRT = "tensorrt"


@contextmanager
def aliases() -> Generator[None]:
    """Let `import tensorrt_llm` and `import tensorrt` in the block find irc.

    Modules of these names that are imported already are put aside, and put back at the end, when
    those of the block are removed. Nothing that is installed is read or changed.
    """
    finder = _Finder()
    with _exchanged({_TENSORRT: _tensorrt()}, [finder]) as finder.aside:
        yield


@contextmanager
def originals() -> Generator[None]:
    """Let imports in the block find what is installed, within `aliases` too."""
    finder = next((entry for entry in sys.meta_path if isinstance(entry, _Finder)), None)
    with nullcontext() if finder is None else _exchanged(finder.aside, []):
        yield


@contextmanager
def _exchanged(
    modules: dict[str, ModuleType], finders: list[_Finder]
) -> Generator[dict[str, ModuleType]]:
    """Let tensorrt_llm and tensorrt be these modules, and others that the finders make.

    Yields the modules that they replace.
    """
    before = _taken_out()
    replaced = [entry for entry in sys.meta_path if isinstance(entry, _Finder)]
    _search(finders)
    sys.modules.update(modules)
    try:
        yield before
    finally:
        _search(replaced)
        _taken_out()
        sys.modules.update(before)


def _search(finders: list[_Finder]) -> None:
    """Search these finders first, and no other of this class."""
    others = [entry for entry in sys.meta_path if not isinstance(entry, _Finder)]
    sys.meta_path[:] = [*finders, *others]


def _taken_out() -> dict[str, ModuleType]:
    """The modules called tensorrt_llm or tensorrt, which are removed from sys.modules."""
    names = [name for name in sys.modules if name.partition(".")[0] in (ROOT, _TENSORRT)]
    return {name: sys.modules.pop(name) for name in names}


def of_sources(path: str) -> Any:
    """The object of this path in the session's sources, even where irc has one."""
    parent, _, name = path.rpartition(".")
    module = import_module(f"{ROOT}.{parent}")
    return module.definitions.get(name) if isinstance(module, _Alias) else getattr(module, name)


class _Finder(MetaPathFinder, Loader):
    """Makes the modules of the API that are known; of others says that there are none."""

    aside: dict[str, ModuleType]  # the installed modules that the block does not see

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        root, _, module = fullname.partition(".")
        if root not in (ROOT, _TENSORRT):
            return None
        if root == ROOT and (spec := source_spec(module)) is not None:
            return spec
        if root == ROOT and (module in ("", "version") or is_module(module)):
            return ModuleSpec(fullname, self, is_package=True)
        near = did_you_mean(module, sorted(modules())) if root == ROOT else ""
        raise ModuleNotFoundError(f"irc has no module {fullname}{near}", name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name.partition(".")[2])

    def exec_module(self, module: ModuleType) -> None:
        """Names are found when they are used."""
        register()


class _Alias(ModuleType):
    """A module of TensorRT-LLM, whose names are found when they are first used."""

    def __init__(self, module: str) -> None:
        path = f"{ROOT}.{module}" if module else ROOT
        super().__init__(path, f"{path} for irc: see `irc lint`.")
        self._module = module
        self.definitions = Definitions(module, _own, unsupported)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self._module in ("", "version"):
            return RELEASES[release()]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        register()
        path = f"{self._module}.{name}".lstrip(".")
        if path in modules() or source_spec(path) is not None:
            return import_module(f"{ROOT}.{path}")
        value = _own(path)
        value = self.definitions.get(name) if value is None else value
        if value is None and (note := status(path)).kind == "refused":
            why, sources = note.why, current_session().sources
            if sources is not None and "--tensorrt-llm-sources" in why:
                why = f"{sources}, which --tensorrt-llm-sources names, does not define it either"
            return unsupported(f"{ROOT}.{path}", why)
        if value is None:
            near = suggestion(self._module, name)
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{near}")
        return value

    @property
    def __all__(self) -> list[str]:
        """The supported names, for `from tensorrt_llm.functional import *`."""
        return sorted(set(names_of(self._module)))


def _own(path: str) -> Any:
    """What irc has of a name of the API; None where it is refused or unknown."""
    note, value = status(path), find(path)
    if value is None and note.kind == "without effect":
        return WithoutEffect(f"{ROOT}.{path}", note.why)
    return None if note.kind == "refused" else value


class WithoutEffect:
    """An object that can be called, entered and asked for attributes, and does nothing."""

    def __init__(self, path: str, why: str) -> None:
        self._path, self._why = path, why

    def __call__(self, *args: Any, **kwargs: Any) -> WithoutEffect:
        current_session().note(f"{self._path} has no effect: {self._why}")
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __repr__(self) -> str:
        return self._path

    def __enter__(self) -> WithoutEffect:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Unsupported(type):
    """The class of unsupported names: scripts may import them, annotate with them, and ask for
    their instances; any other use is an Error."""

    refusal: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ScriptError(cls.refusal)

    __iter__ = __getitem__ = __call__

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()

    def __instancecheck__(cls, instance: object) -> bool:
        return False


def unsupported(path: str, why: str) -> type:
    """A class that raises an Error with the alternative when it is used."""

    def refuse(cls: Any, **_: Any) -> None:
        raise ScriptError(cls.refusal)

    refusal = f"{path} is not supported: {why}"
    body = {"refusal": refusal, "__init_subclass__": classmethod(refuse)}
    return _Unsupported(path.rpartition(".")[2], (), body)


class _Level(IntEnum):
    """The severities of TensorRT's logger."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class _Logger:
    """TensorRT's logger, which prints messages of the script: irc reports errors itself."""

    Severity = _Level
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = _Level

    def __init__(self, min_severity: _Level = _Level.WARNING) -> None:
        self.min_severity = min_severity

    def log(self, severity: _Level, text: str) -> None:
        """Print a message of the script to standard error."""
        if severity <= self.min_severity:
            print(text, file=sys.stderr)


_DTYPES = "float32 float16 bfloat16 int8 int32 int64 int4 uint8 bool fp8 fp4"


class _TensorrtAlias(ModuleType):
    """`tensorrt`: dtypes, the logger, and enumerations; other names are refused when used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module 'tensorrt' has no attribute {name!r}")
        if name.isupper() or name[0].islower():
            near = did_you_mean(name, vars(self), "use tensorrt_llm.functional")
            raise AttributeError(f"irc has no tensorrt.{name}{near}")
        why = "irc builds its own network; use tensorrt_llm.functional and tensorrt_llm.Builder"
        return unsupported(f"{_TENSORRT}.{name}", why)


def _no_plugins(logger: object = None, namespace: str = "") -> bool:
    """True: irc registers the plugins of engines itself."""
    return True


def _tensorrt() -> ModuleType:
    from .dtypes import DataType, data_type, numpy_of
    from .enums import OF_TENSORRT

    module = _TensorrtAlias(_TENSORRT, "The dtypes and the logger of TensorRT, for irc.")
    module.__spec__ = ModuleSpec(_TENSORRT, None, is_package=True)
    vars(module).update({name: data_type(name) for name in _DTYPES.split()})
    vars(module).update(OF_TENSORRT, DataType=DataType, Logger=_Logger, nptype=numpy_of)
    vars(module).update(init_libnvinfer_plugins=_no_plugins, __path__=[], __version__="10.7.0")
    return module
