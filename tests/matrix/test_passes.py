"""Random modules on random meshes: every pass keeps what a module computes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.pipeline.base import PASSES
from irc.pipeline.instruments import VerifyEach
from tests.fresh import session_seed

from .checking import Case, check_text
from .draw import MESHES, Draw
from .reducing import report

CASES, PER_TEST = 240, 20
SCHEMES = ("auto", "replicated", "rows", "columns", "cyclic")
# At any place of a pipeline, and at one place of it.
ANYWHERE = {
    "canonicalize": "", "cse": "", "dce": "", "expand": "", "fold": "", "inline": "",
    "fuse-attention": "", "fuse-collectives": "{norm=true}", "fuse-experts": "",
    "fuse-gated-mlp": "", "fuse-linear-epilogue": "", "fuse-linears": "", "fuse-norm": "",
    "fuse-qkv": "", "fuse-quantize": "",
}  # fmt: skip
MASKING = ("attention", "selective_scan", "gated_delta")  # compute with masked numbers, as zeros
EXACT = ("canonicalize", "cse", "dce", "fold", "inline")  # the same bits
IN_ORDER = ("shard", "rewrite-embeddings", "pipeline", "localize")
ELSEWHERE = {
    "convert-floats": "changes dtypes: tests/frontends/test_onnx_dtypes.py",
    "quantize": "changes what is computed: tests/passes/test_quantize.py",
    "next-tokens": "changes the results: tests/passes/test_next_tokens.py",
    "page-caches": "changes the states: tests/passes/test_page_caches.py",
    "static-capacity": "changes what an overflow gives: tests/tensorrt/test_golden.py",
}
# Words of the Error of a pass that does not apply to a module, which it must leave as it was.
REFUSALS = {
    # of x + linear(x) that is one operation already
    "shard": (
        *("shards no weight", "has no rows", "which cut a block of"),
        "fused_linear: dimension",
    ),
    "rewrite-embeddings": ("was requested, but",),
    "pipeline": ("too few", "cannot be cut"),
    # of fewer rows than ranks, and of slots of tokens over dp
    "expand": (
        "the expansion of dequantize",
        "the expansion of moe_slots",
        "the expansion of experts",
    ),
    # of expanded experts; of a batch over dp with weights over dp and tp; of one row a rank
    "localize": (
        *("a sharded table has a number of rows, not a symbol", "mixes a partial sum over"),
        *("reshape needs dimension",),
    ),
    "canonicalize": ("needs a dimension replicated that is sharded",),  # reshapes of local heads
}


def test_every_pass_is_in_the_matrix() -> None:
    assert {*ANYWHERE, *IN_ORDER, *ELSEWHERE} == set(PASSES)


def case_of(seed: int, steps: int = 10, dtype: str = "") -> Case:
    """A random module with inputs, a mesh and a plan."""
    rng = random.Random(seed)
    dtype = dtype or rng.choice(["f64", "f64", "f32"])
    drawn = Draw(seed, dtype, steps)
    # slots are numbered within a replica, so that a buffer that is given has others over dp
    has_slots = any(op.opname == "moe_slots" for op in drawn.module.ops())
    mesh = rng.choice([mesh for mesh in MESHES if not has_slots or "dp" not in mesh])
    sequence = rng.random() < 0.3
    # Replicas share the batch evenly, and ranks the tokens; it may be empty.
    even = [0, 12] if sequence else [0, 2, 4, 8]
    batch = rng.choice(even if sequence or "dp" in mesh else [0, 1, 2, 3, 5, 8])
    # What masked NaN become is open.
    masks = any(op.opname in MASKING for op in drawn.module.ops())
    inputs = drawn.inputs(batch, special=rng.random() < 1 / 3 and not masks)
    return Case(str(drawn.module), inputs, mesh, tuple(drawn.plan(mesh)), dtype, sequence)


def pipeline_of(case: Case, seed: int) -> list[str]:
    """The passes of a case, one by one."""
    rng = random.Random(seed)
    fixed = ["shard", f"rewrite-embeddings{{scheme={rng.choice(SCHEMES)}}}"]
    if "pp=" in case.mesh or rng.random() < 0.3:
        fixed.append(
            "pipeline" if "pp=" in case.mesh else f"pipeline{{stages={rng.choice([2, 3])}}}"
        )
    fixed += ["localize"]
    found: list[str] = []
    for step in ([] if case.mesh == "tp=1" else fixed) + [""]:
        found += [name + ANYWHERE[name] for name in rng.choices(sorted(ANYWHERE), k=3)]
        found += [step] if step else []
    return found


def multiplies_sums(module: Module) -> bool:
    """Whether infinities may meet zeros: of partial sums that are multiplied before they are added,
    or of the results of experts on other ranks."""
    if any(op.opname in ("moe_combine", "experts") for op in module.ops()):
        return True
    products = [op for op in module.ops() if op.opname in ("mul", "div", "matmul", "linear")]
    return any(value.type.partial for op in products for value in op.operands)


def finite(case: Case) -> bool:
    """Whether no input is infinite."""
    return not any(np.isinf(x).any() for x in case.inputs.values() if x.dtype.kind == "f")


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same to the sign of zeros."""
    same = np.array_equal(a, b, equal_nan=a.dtype.kind not in "iub")
    return same and np.array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


def check_passes(case: Case, seed: int, folder: Path, changed: Counter[str]) -> None:
    """Compare a case with its results after each pass; count the passes that changed it."""
    wanted, module = case.wanted(), case.module()
    if not wanted.stable:
        return
    for step in pipeline_of(case, seed):
        name, before = step.partition("{")[0], str(module)
        step = case.shard(folder, module) if name == "shard" else step
        try:
            run_pipeline(module, step, [VerifyEach()])
        except Error as error:
            words = REFUSALS.get(name, ())
            assert any(word in error.message for word in words), f"{step}: {error}"
            if name in ("shard", "expand", "localize", "canonicalize"):
                return
            assert str(module) == before, f"{step} left a partial change"
            continue
        if name == "shard" and multiplies_sums(module) and not finite(case):
            return
        if str(module) != before:
            changed[name] += 1
            wanted.check_module(module, case.inputs, f"after {step}")
            check_text(module)
            old = irc.parse(before)
            if name in EXACT and not old.local:
                got, same = (evaluate(each, case.inputs) for each in (module, old))
                assert all(equal_bits(got[key], array) for key, array in same.items()), step
        if name in ANYWHERE and name != "fuse-collectives":
            after = str(module)
            run_pipeline(module, step)
            assert str(module) == after, f"a second {step} changes the module again"


@pytest.mark.parametrize("block", range(CASES // PER_TEST))
def test_passes_keep_the_results(block: int, tmp_path: Path) -> None:
    changed: Counter[str] = Counter()
    for i in range(PER_TEST):
        seed = session_seed() * 1000 + block * PER_TEST + i
        report(
            case_of(seed),
            lambda case, seed=seed: check_passes(case, seed, tmp_path, changed),
            tmp_path,
            f"seed {seed}",
        )
    assert changed["localize"] and changed["shard"]
    print(changed)


def test_a_failing_case_is_reduced_and_saved(tmp_path: Path) -> None:
    case = next(c for c in map(case_of, range(100)) if c.text.count("= linear") > 2 and c.plan)

    def check(case: Case) -> None:
        assert "= linear" not in case.text, "a linear: what is reduced has the same beginning"

    with pytest.raises(AssertionError) as caught:
        report(case, check, tmp_path, "a pass")
    saved = irc.parse((tmp_path / "case.irc").read_text(encoding="utf-8"))
    assert [op.opname for op in saved.main] == ["linear", "return"]
    assert str(tmp_path / "case.irc") in str(caught.value) and str(saved) in str(caught.value)
    with np.load(tmp_path / "inputs.npz") as inputs:
        assert set(inputs) == {arg.name for arg in saved.main.args}
