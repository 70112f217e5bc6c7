"""Engines built without a GPU: their kernels, their bytes, the cache, the progress."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.builder.request import Built
from irc.backends.tensorrt.target import Target
from tests.tensorrt.graphs import (
    HALF,
    TARGET,
    asked,
    attention,
    external,
    gemm,
    node,
    profile,
    relu,
    saved,
)

pytestmark = pytest.mark.needs_rtx


def built(path: Path, tell: Any = lambda stage, fraction: None) -> Built:
    """An engine with two profiles."""
    decode = profile("decode", path, B=(1, 2, 4), S=(1, 1, 1))
    return build(asked(path, [decode, profile("prefill", path, B=(1, 1, 4), S=(1, 16, 128))]), tell)


def test_a_report_names_the_kernels_of_each_operation(tmp_path: Path) -> None:
    report = built(gemm(tmp_path)).report
    assert report.library == str(find("tensorrt-rtx")) and report.target == str(TARGET)
    assert report.kinds("decode") == {"shape_call": 1, "gemm": 1, "comm_allreduce": 1, "kgen": 1}
    assert report.kinds("decode") == report.kinds("prefill")
    (product,) = report.layers_of("linear", "decode")
    assert product.kind == "gemm" and product.operations == ("layers.0/linear",)
    assert [(t.dtype, t.dims) for t in product.inputs] == [("f16", (-1, 64))]
    assert [(t.dtype, t.dims) for t in product.outputs] == [("f16", (-1, 128))]
    assert [layer.kind for layer in report.layers_of("all_reduce", "prefill")] == ["comm_allreduce"]
    assert {layer.profile for layer in report.layers_of("layers.0")} == {0, 1}
    assert report.layers_of("layers") == report.layers_of("layers.0")
    assert not report.layers_of("layer") and not report.layers_of("lin")
    assert len(report.activations) == 2 and all(size > 0 for size in report.activations)


def test_a_decode_step_attends_in_one_kernel_and_progress_rises(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    report = built(attention(tmp_path), lambda *step: told.append(step)).report
    (kernel,) = [x for x in report.layers_of("attention", "decode") if "mha" in x.name]
    assert "gemv_mha" in kernel.name
    assert {"nk", "nv", "kl"} <= {tensor.name for tensor in kernel.inputs}
    assert {tensor.dtype for tensor in kernel.outputs} == {"bf16"}
    assert len(report.layers_of("attention", "prefill")) > 2  # the cache is expanded there
    assert {stage for stage, _ in told} == {"building m.engine"}
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert len({*fractions}) > 20


def test_equal_builds_come_from_the_cache(tmp_path: Path) -> None:
    stages: list[str] = []

    def again(kind: Any = relu, target: Target = TARGET, **changes: Any) -> Built:
        stages.clear()
        request = asked(kind(tmp_path), caching=True, cache=tmp_path / "kept", **changes)
        return build(replace(request, target=target), lambda stage, _: stages.append(stage))

    def exp(folder: Path) -> Path:
        return saved(folder, node("Exp", "x"), *HALF)

    first = again()
    data = first.engine.read_bytes()
    assert not first.cached
    first.engine.unlink()
    second = again()
    assert second.cached and second.report == first.report
    assert second.engine.read_bytes() == data
    assert {*stages} == {"reading m.engine from the cache"}
    assert not again(workspace=1 << 20).cached
    assert not again(weight_streaming=True).cached
    assert not again(target=Target.parse("tensorrt-rtx/sm_89")).cached
    assert not again(exp).cached
    assert again().cached
    kept = sorted(path.suffix for path in (tmp_path / "kept").iterdir())
    assert kept == [".engine"] * 5 + [".json"] * 5


def test_weights_are_read_below_the_base(tmp_path: Path) -> None:
    numbers = np.arange(64 * 128).astype(np.float16)
    file = tmp_path / "checkpoint" / "deep" / "w.bin"
    file.parent.mkdir(parents=True)
    model = external(tmp_path / "a", "deep/w.bin")
    request = asked(model, base=tmp_path / "checkpoint", caching=True, cache=tmp_path / "kept")
    for weight in (5, 77):  # other weights, the same model
        numbers[-1] = weight
        file.write_bytes(b"\0" * 7 + numbers.tobytes())
        new = build(request)
        assert not new.cached and numbers[-2000:].tobytes() in new.engine.read_bytes()
        assert build(request).cached
