"""Writes functional.pyi: the derived functions for type checkers and editors.

python -m irc.frontends.stubs          # after an operation was added or changed
"""

from __future__ import annotations

from pathlib import Path

from ..ir.core import Op
from .wrappers import documentation, returns, signature, wrapped

STUB = Path(__file__).with_name("functional.pyi")

_HEAD = '''"""Functions over tensors, written by `python -m irc.frontends.stubs`."""

from collections.abc import Iterable, Sequence
from typing import Literal

from ..ir.core import Function
from .tensor import Operand, SizeLike, Tensor

# fmt: off
# ruff: noqa: E501
'''
# What functional.py takes besides the attributes of an operation.
_WRITTEN = {"transpose": "x: Tensor, *order: int | Sequence[int]"}


def stub() -> str:
    """The text of functional.pyi: the signature and summary of irc's operations, by name."""
    return _HEAD + "".join(
        _function(name, cls)
        for name, cls in sorted(wrapped().items())
        if cls.__module__.startswith("irc.ops.")  # another package's are in this process only
    )


def _function(name: str, cls: type[Op]) -> str:
    """The signature and the summary of a function, on one line."""
    summary = documentation(cls).splitlines()[0].replace("\\", "\\\\")
    parameters = _WRITTEN.get(name) or ", ".join(signature(cls, annotated=True))
    return f'def {name}({parameters}) -> {returns(cls)}: """{summary}"""\n'


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(f"{STUB}: {len(wrapped())} functions")
