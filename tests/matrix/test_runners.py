"""Random modules through the default pipeline of each backend, on each runner."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from irc.backends.cuda.backend import CudaBackend
from irc.backends.onnx import backend as onnx
from irc.errors import Error
from irc.ir.core import Module
from tests.backends.checked_models import emit_checked
from tests.cuda.run_plan import HostProgram
from tests.fresh import session_seed

from .checking import Arrays, Case, transformed, without
from .reducing import report
from .test_passes import MASKING, REFUSALS, case_of

Runner: TypeAlias = Callable[[Module, Arrays, Path], dict[str, np.ndarray]]
CASES, PER_TEST = 120, 20
CUDA_CASES = 5  # whose kernels g++ compiles
EMPTY = "is empty, which not every operation of it can be"
# of ONNX Runtime, for the product of a quantized table with itself
ZERO_POINTS = "input a zero point must be a scalar"
NO_LOWERING = "sample: has no lowering"


def on_onnxruntime(module: Module, inputs: Arrays, folder: Path) -> dict[str, np.ndarray]:
    """ONNX Runtime; several ranks are threads."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    facts = emit_checked(module, out)
    options: dict[str, Any] = {"timeout": 100} if module.mesh.ranks > 1 else {}
    return onnx.load(out, facts, threads=1, **options).run(inputs)


def on_the_host(module: Module, inputs: Arrays, folder: Path) -> dict[str, np.ndarray]:
    """Plans of the backend cuda, compiled for the host."""
    return HostProgram(module).run(inputs)


def check_runner(case: Case, pipeline: str, run: Runner, folder: Path) -> None:
    """Compare a case on a runner with its results by the reference."""
    wanted = case.wanted()
    if not wanted.stable:
        return
    try:
        module = transformed(case, case.pipeline(pipeline, folder))
        results = run(module, case.inputs, folder)
    except Error as error:
        refusals = [
            EMPTY,
            ZERO_POINTS,
            NO_LOWERING,
            *(word for words in REFUSALS.values() for word in words),
        ]
        assert any(word in str(error) for word in refusals), error
        return
    wanted.check_all(results, f"by {run.__name__}")


def runner_case(seed: int, ranks: bool, dtype: str, steps: int = 10) -> Case:
    """A case for runners. Kernels may leave open what masked NaN and codes of NaN become."""
    case = case_of(seed, steps, dtype)
    if any(
        f"= {op} " in case.text for op in (*MASKING, "moe_combine", "quantize", "quantize_rows")
    ):
        finite = {name: np.nan_to_num(x, posinf=1, neginf=-1) for name, x in case.inputs.items()}
        case = without(case, inputs=finite)
    return case if ranks else without(case, mesh="tp=1")


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("block", range(CASES // PER_TEST))
def test_onnx_runtime_agrees(block: int, ranks: bool, tmp_path: Path) -> None:
    pipeline = onnx.sharded_pipeline if ranks else onnx.default_pipeline
    for i in range(PER_TEST):
        seed = session_seed() * 1000 + block * PER_TEST + i
        case = runner_case(seed, ranks, "f32")
        if case.mesh == "tp=1" and ranks:
            continue
        report(
            case,
            lambda case: check_runner(case, pipeline, on_onnxruntime, tmp_path),
            tmp_path,
            f"seed {seed}: {pipeline}, on ONNX Runtime",
        )


@pytest.mark.parametrize("ranks", [False, True])
def test_cuda_on_the_host_agrees(ranks: bool, tmp_path: Path) -> None:
    pipeline = CudaBackend.sharded_pipeline if ranks else CudaBackend.default_pipeline
    for i in range(CUDA_CASES):
        seed = session_seed() * 1000 + i
        case = runner_case(seed, ranks, "f32", steps=8)
        if ranks and ("pp=" in case.mesh or case.mesh == "tp=1"):
            continue  # the host runs one function
        report(
            case,
            lambda case: check_runner(case, pipeline, on_the_host, tmp_path),
            tmp_path,
            f"seed {seed}: {pipeline}, on the host",
        )
