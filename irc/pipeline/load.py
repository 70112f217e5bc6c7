"""`load_file`: runs a Python file of the user that registers passes, operations or models."""

from __future__ import annotations

from pathlib import Path

from ..extensions.user_files import run

_KINDS = ("pass", "operation", "plugin", "model", "scheme")
_NOTHING = (
    "registers no pass, operation, plugin, model family, scheme or lowering; "
    'put @register("name") or @operation("name") above a class'
)


def load_file(path: str | Path) -> list[str]:
    """Run a Python file of the user once per process.

    Returns the names of its passes, operations, plugins, model families and quantization schemes;
    it may also register lowerings for TensorRT. What the file prints goes to standard error. An
    Error names the line at which the file fails; then it registers nothing.
    """
    file = run(path, (*_KINDS, "lowering"), _NOTHING).registered
    keys = [key for kind in _KINDS for key in file.get(kind, ())]
    return [key if isinstance(key, str) else key[-1] for key in keys]
