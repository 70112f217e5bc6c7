"""Layers on several ranks as ONNX Runtime runs them, and as engines that are built.

The tests of the layers run with other programs in the place of the reference.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import irc

from . import test_embedding as tables
from . import test_linear_layers as linear
from . import test_moe as moe
from . import test_quantized_layers as quantized
from . import worlds

Test = Callable[[], None]
CASES: dict[str, Test] = {
    "rows": lambda: tables.test_rows_over_ranks(29, 2, "int32"),
    "columns": lambda: tables.test_columns_over_ranks(2, "int32"),
    "quantized rows": lambda: tables.test_a_factor_per_row(2, True, 0),
    "geglu": lambda: linear.test_mlp(2, "geglu"),
    "fused": lambda: linear.test_gated_mlp(2, "FusedGatedMLP", "0.16", True, "silu"),
    "experts": lambda: moe.test_experts_over_ranks(4, 2, "swiglu", True),
    "experts of two ranks": lambda: moe.test_experts_over_ranks(2, 2, "swiglu", True),
    "int4, columns": lambda: quantized.test_weight_only_linear(4, "0.16", False, 2),
    "int4, rows": lambda: quantized.test_weight_only_linear(4, "0.16", True, 2),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(module: irc.Module, inputs: Any) -> list[dict[str, Any]]:
        irc.compile(module, tmp_path / "out")
        return [irc.load(tmp_path / "out", threads=1).run(inputs)]

    monkeypatch.setattr(worlds, "run_ranks", run)
    CASES[name]()


BUILT = ("quantized rows", "geglu", "experts of two ranks", "int4, rows")


@pytest.mark.oracle
@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", BUILT)
def test_engines_are_built(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = worlds.run_ranks

    def build(module: irc.Module, inputs: Any) -> list[dict[str, Any]]:
        engine = {"target": "tensorrt-rtx/sm_89"}
        irc.compile(module, tmp_path / "out", backend="tensorrt-rtx", engine=engine)
        # quantized weights are constants of the engine, so each rank has its own
        constant = module.local and any(op.opname == "dequantize" for op in module.ops())
        assert len(list((tmp_path / "out").glob("*.engine"))) == 1 + constant
        return run(module, inputs)

    monkeypatch.setattr(worlds, "run_ranks", build)
    CASES[name]()
