"""Writes functional.pyi: the derived functions as type checkers and editors read them.

    python -m irc.frontends.stubs          # after an operation was added or changed
"""

from __future__ import annotations

from pathlib import Path

from .wrappers import documentation, returns, signature, wrapped

STUB = Path(__file__).with_name("functional.pyi")

_HEAD = '''"""Functions over symbolic tensors; written by `python -m irc.frontends.stubs`, not by hand."""

from collections.abc import Iterable, Sequence
from typing import Literal

from ..core import Function
from .tensor import Operand, SizeLike, Tensor
'''


def stub() -> str:
    """The text of functional.pyi, the functions in alphabetical order."""
    parts = [_HEAD]
    for name, cls in sorted(wrapped().items()):
        body = "".join(f"    {line}".rstrip() + "\n" for line in documentation(cls).splitlines())
        text = body.strip().replace("\\", "\\\\")
        result = f"def {name}({signature(cls, annotated=True)}) -> {returns(cls)}:"
        end = '\n    """' if "\n" in text else '"""'
        parts.append(f'\n{result}\n    """{text}{end}\n')
    return "".join(parts)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(f"{STUB}: {len(wrapped())} functions")
