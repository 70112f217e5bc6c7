"""Every example of every operation: its plan on the host, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.backend import backend
from irc.backends.reference import evaluate, evaluate_ranks
from irc.ir.declare import REGISTRY
from tests.cuda.emulate import prepare
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import assert_close
from tests.ops.example import Example, inputs_of, module_of
from tests.ops.examples import EXAMPLES

# localize writes them in other operations
GLOBAL_VIEW = {"shard_slice", "sharded_topk", "sharded_max", "cyclic_embedding"}


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


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW and examples_of(op)])
def test_plans_agree(op: str, rng: np.random.Generator) -> None:
    """Each example in one of its dtypes, drawn afresh."""
    cases: list[tuple[Example, str, HostProgram]] = []
    for example in examples_of(op):
        dtype = str(rng.choice(example.dtypes))
        cases.append((example, dtype, HostProgram(module_of(example, dtype))))
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
                assert_close(got[name], want[name], f"{example} {dtype} {name}", factor=2)
