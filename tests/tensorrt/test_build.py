"""Engines built without a GPU: their kernels, their bytes, the cache, the progress."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.builder.request import BuildRequest, Built
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


def two_profiles(path: Path) -> BuildRequest:
    decode = profile("decode", path, B=(1, 2, 4), S=(1, 1, 1))
    return asked(path, [decode, profile("prefill", path, B=(1, 1, 4), S=(1, 16, 128))])


def test_a_report_names_the_kernels_of_each_operation(tmp_path: Path) -> None:
    built = build(two_profiles(gemm(tmp_path)))
    report = built.report
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
    assert len(report.activations) == 2 and all(each > 0 for each in report.activations)


def test_a_decode_step_attends_in_one_kernel(tmp_path: Path) -> None:
    report = build(two_profiles(attention(tmp_path))).report
    kernels = [each for each in report.layers_of("attention", "decode") if "mha" in each.name]
    (kernel,) = kernels
    assert "gemv_mha" in kernel.name
    assert {"nk", "nv", "kl"} <= {tensor.name for tensor in kernel.inputs}
    assert {tensor.dtype for tensor in kernel.outputs} == {"bf16"}
    assert len(report.layers_of("attention", "prefill")) > 2  # the cache is expanded there


def test_equal_builds_come_from_the_cache(tmp_path: Path) -> None:
    stages: list[str] = []

    def tell(stage: str, fraction: float) -> None:
        stages.append(stage)

    def again(kind: Any = relu, target: Target = TARGET, **changes: Any) -> Built:
        stages.clear()
        request = asked(kind(tmp_path), caching=True, cache=tmp_path / "kept", **changes)
        return build(replace(request, target=target), tell)

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


def test_progress_rises_from_0_to_1(tmp_path: Path) -> None:
    reported: list[tuple[str, float]] = []
    request = two_profiles(attention(tmp_path))
    build(request, lambda stage, fraction: reported.append((stage, fraction)))
    assert {stage for stage, _ in reported} == {"building m.engine"}
    fractions = [fraction for _, fraction in reported]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert len({*fractions}) > 20


def test_weights_are_read_below_the_base(tmp_path: Path) -> None:
    numbers = np.arange(64 * 128).astype(np.float16)
    base = tmp_path / "checkpoint"
    (base / "deep").mkdir(parents=True)
    (base / "deep" / "w.bin").write_bytes(b"\0" * 7 + numbers.tobytes())
    model = external(tmp_path / "a", "deep/w.bin")
    cache = tmp_path / "kept"
    built = build(asked(model, base=base, caching=True, cache=cache))
    assert numbers[:2000].tobytes() in built.engine.read_bytes()
    assert build(asked(model, base=base, caching=True, cache=cache)).cached
    numbers[5] = 77  # other weights, the same model
    (base / "deep" / "w.bin").write_bytes(b"\0" * 7 + numbers.tobytes())
    changed = build(asked(model, base=base, caching=True, cache=cache))
    assert not changed.cached and numbers[:2000].tobytes() in changed.engine.read_bytes()
