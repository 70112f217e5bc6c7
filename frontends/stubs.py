"""Writes functional.pyi: the derived functions as type checkers and editors read them.

python -m irc.frontends.stubs          # after an operation was added or changed
"""

from __future__ import annotations

from pathlib import Path

from .wrappers import documentation, returns, signature, wrapped

STUB = Path(__file__).with_name("functional.pyi")

_HEAD = '''"""Functions over symbolic tensors, as `python -m irc.frontends.stubs` writes them."""

from collections.abc import Iterable, Sequence
from typing import Literal

from ..core import Function
from .tensor import Operand, SizeLike, Tensor

# fmt: off
# ruff: noqa: E501
'''
_WIDTH = 100


def stub() -> str:
    """The text of functional.pyi: our own operations, in alphabetical order."""
    parts = [_HEAD]
    for name, cls in sorted(wrapped().items()):
        if not cls.__module__.startswith("irc.ops."):
            continue  # another package's, registered in this process only
        body = "".join(f"    {line}".rstrip() + "\n" for line in documentation(cls).splitlines())
        text = body.strip().replace("\\", "\\\\")
        result = _wrapped(f"def {name}(", signature(cls, annotated=True), f") -> {returns(cls)}:")
        end = '\n    """' if "\n" in text else '"""'
        parts.append(f'\n{result}\n    """{text}{end}\n')
    return "".join(parts)


def _wrapped(begin: str, parameters: list[str], end: str) -> str:
    """On one line where that fits, else a line per parameter."""
    line = begin + ", ".join(parameters) + end
    if len(line) <= _WIDTH:
        return line
    return "\n".join([begin, *(f"    {parameter}," for parameter in parameters), end])


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(f"{STUB}: {len(wrapped())} functions")
