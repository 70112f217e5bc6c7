"""The examples of every operation: `EXAMPLES[opname]` is a list, never empty."""

from __future__ import annotations

from importlib import import_module

from tests.ops.example import Example

MODULES = (
    "examples_elementwise",
    "examples_shape",
    "examples_others",
    "examples_layers",
    "examples_moe",
    "examples_distributed",
    "examples_quant",
    "examples_recurrent",
    "examples_sample",
)


def collect() -> dict[str, list[Example]]:
    """The `EXAMPLES` lists of all example modules, by operation, in order."""
    by_operation: dict[str, list[Example]] = {}
    for name in MODULES:
        for example in import_module(f"tests.ops.{name}").EXAMPLES:
            by_operation.setdefault(example.op, []).append(example)
    return by_operation


EXAMPLES = collect()
