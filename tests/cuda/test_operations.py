"""Every example of every operation: its plan on the host, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.backends.cuda.backend import backend
from irc.backends.cuda.plan.prepare import covers, load_tables
from irc.backends.cuda.plan.regime import Target
from irc.backends.cuda.plan.template import LAUNCHES
from irc.backends.reference import evaluate, evaluate_ranks
from irc.ir.core import Module
from irc.ir.declare import REGISTRY, op_class
from tests.cuda.cases import compare, dtypes_taken, odd_sizes
from tests.cuda.emulate import prepare
from tests.cuda.run_plan import HostProgram
from tests.ops.example import Example, inputs_of, module_of
from tests.ops.examples import EXAMPLES

load_tables()
# localize writes them in other operations
GLOBAL_VIEW = {"shard_slice", "sharded_topk", "sharded_max", "cyclic_embedding"}

CAPPED = {
    "attention",
    "cache_update",
    "fused_attention",
    "rope_and_cache",
}  # refuse positions beyond the capacity of caches
LENGTHS = "lengths"  # an operand that refuses numbers beyond the tokens


def examples_of(op: str) -> list[Example]:
    """The examples of an operation that one module can run."""
    return [
        example
        for example in EXAMPLES[op]
        if (example.local or not example.mesh) and (op != "return" or example.args)
    ]


def test_operations_without_kernels() -> None:
    missing = {
        op
        for op, examples in EXAMPLES.items()
        if op in REGISTRY and backend.unsupported(module_of(examples[0], examples[0].dtypes[0]))
    }
    assert missing == GLOBAL_VIEW & EXAMPLES.keys()


def dtypes_of(example: Example, rng: np.random.Generator) -> set[str]:
    """One of the usual dtypes, and where one kernel computes the operation, one of all."""
    found = {str(rng.choice(example.dtypes))}
    if not example.local and covers(op_class(example.op)):
        found.add(str(rng.choice(dtypes_taken(example))))
    return found


def _program(module: Module, fused: bool) -> HostProgram:
    """The plans of ranks that share no memory, on a small GPU."""
    program = HostProgram(module, fused=fused, target=Target(multiprocessors=4))
    for planner in program.planners:
        axes = (getattr(op, "axis", "") for op in module.ops())
        planner.apart = dict.fromkeys(axes, "ranks on the host share no memory")
    return program


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW and examples_of(op)])
def test_plans_agree(op: str, rng: np.random.Generator) -> None:
    """Each example in up to two dtypes, at its sizes, at odd ones, and with an empty batch.

    With kernels of composite operations, and without.
    """
    fusing = (True, False) if op_class(op) in LAUNCHES else (True,)
    cases: list[tuple[Example, str, HostProgram]] = []
    for example in examples_of(op):
        for dtype in sorted(dtypes_of(example, rng)):
            sizes = [example.sizes] if example.local else odd_sizes(example, rng)
            capped = op in CAPPED or any(arg.name == LENGTHS for arg in example.args)
            sizes = sizes[:: 2 if capped else 1]  # without odd ones
            for fused in fusing:
                program = _program(module_of(example, dtype), fused)
                cases += [(replace(example, sizes=each), dtype, program) for each in sizes]
    prepare(
        kernel
        for example, _, program in cases
        for planner in program.planners
        for kernel in planner.plan(example.sizes).kernels.values()
    )
    for example, dtype, program in cases:
        module = program.module
        if not module.local:
            inputs = inputs_of(example, dtype, rng)
            wanted = [evaluate(module, inputs, sizes=example.sizes)]
            found = program.ranks(inputs, **example.sizes)
        else:
            drawn = [inputs_of(example, dtype, rng) for _ in program.planners]
            given = {name: [arrays[name] for arrays in drawn] for name in drawn[0]}
            wanted = evaluate_ranks(module, given, sizes=example.sizes)
            found = program.ranks(given, **example.sizes)
        for got, want in zip(found, wanted, strict=True):
            for name in want:
                compare(got[name], want[name], example, dtype)
