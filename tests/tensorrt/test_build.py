"""Engines built without a GPU: what their kernels are, their bytes, the cache, what is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from irc.backends.tensorrt.builder import header
from irc.backends.tensorrt.builder.build import BuildRequest, Built, build
from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.target import Target
from tests.tensorrt.graphs import (
    BF16,
    TARGET,
    asked,
    attention,
    gemm,
    node,
    profile,
    relu,
    save,
    value,
)

pytestmark = pytest.mark.needs_rtx


def two_profiles(path: Path) -> BuildRequest:
    decode = profile("decode", path, B=(1, 2, 4), S=(1, 1, 1))
    return asked(path, [decode, profile("prefill", path, B=(1, 1, 4), S=(1, 16, 128))])


def test_a_product_a_collective_and_what_the_report_says_of_them(tmp_path: Path) -> None:
    built = build(two_profiles(gemm(tmp_path / "m.onnx", "all_reduce")))
    report = built.report
    assert report.library == str(find("tensorrt-rtx")) and report.target == str(TARGET)
    assert report.kinds("decode") == {"shape_call": 1, "gemm": 1, "comm_allreduce": 1, "kgen": 1}
    assert report.kinds("decode") == report.kinds("prefill")
    (product,) = report.layers_of("linear", "decode")
    assert product.kind == "gemm" and product.operations == ("layers.0/linear",)
    assert [(t.dtype, t.dims) for t in product.inputs] == [("f16", (-1, 64))]
    assert [(t.dtype, t.dims) for t in product.outputs] == [("f16", (-1, 128))]
    assert product.constants[0].dims == (64, 128)
    assert [layer.kind for layer in report.layers_of("all_reduce", "prefill")] == ["comm_allreduce"]
    assert {layer.profile for layer in report.layers_of("layers.0")} == {0, 1}
    assert report.layers_of("layers") == report.layers_of("layers.0")
    assert not report.layers_of("layer") and not report.layers_of("lin")
    x = next(port for port in report.ports if port.name == "x")
    assert x.ranges == (((1, 64), (2, 64), (4, 64)), ((1, 64), (1, 64), (4, 64)))
    assert [memory.profile for memory in report.memory] == [0, 1]
    assert all(memory.activation >= memory.scratch > 0 for memory in report.memory)
    assert report.weights >= 64 * 128 * 2
    assert report.engine_bytes == built.engine.stat().st_size
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_a_product_takes_what_follows_into_its_kernel(tmp_path: Path) -> None:
    # In f16 without a collective between them, relu needs no kernel of its own.
    report = build(two_profiles(gemm(tmp_path / "m.onnx"))).report
    (kernel,) = [each for each in report.of_profile(0) if each.kind != "shape_call"]
    assert set(kernel.operations) == {"layers.0/linear", "layers.0/relu"}


def test_a_decode_step_attends_in_one_kernel(tmp_path: Path) -> None:
    report = build(two_profiles(attention(tmp_path / "m.onnx"))).report
    kernels = [each for each in report.layers_of("attention", "decode") if "mha" in each.name]
    (kernel,) = kernels
    assert "gemv_mha" in kernel.name
    assert {"nk", "nv", "kl"} <= {tensor.name for tensor in kernel.inputs}
    assert {tensor.dtype for tensor in kernel.outputs} == {"bf16"}
    assert len(report.layers_of("attention", "prefill")) > 2  # the whole cache is expanded there


@pytest.mark.parametrize(
    ("operation", "kind"),
    [("all_gather", "comm_allgather"), ("broadcast", "DistCollective")],
)
def test_collectives_of_either_kind_are_in_the_report(
    tmp_path: Path, operation: str, kind: str
) -> None:
    path = gemm(tmp_path / "m.onnx", operation)
    report = build(asked(path, [profile("one", path, B=(1, 2, 4))])).report
    assert [each.kind for each in report.layers_of(operation)] == [kind]


def test_builds_have_the_same_bytes_wherever_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this model leaves to chance is which of its equal dimensions an output is named after.
    engines: set[bytes] = set()
    for i in range(6):
        monkeypatch.setenv("IRC_TEST_PADDING", "x" * 137 * i)
        folder = tmp_path / ("long" * 6 * i + "x")
        folder.mkdir()
        engines.add(build(two_profiles(attention(folder / "m.onnx"))).engine.read_bytes())
    assert len(engines) == 1


def test_a_second_build_comes_from_the_cache_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []

    def tell(stage: str, fraction: float) -> None:
        said.append(stage)

    def again(**changes: Any) -> Built:
        said.clear()
        path = relu(tmp_path / "m.onnx")
        return build(asked(path, caching=True, cache=tmp_path / "kept", **changes), tell)

    first = again()
    whole = first.engine.read_bytes()
    assert not first.cached and first.peak_bytes > 10e6
    first.engine.unlink()
    second = again()
    assert second.cached and second.report == first.report and second.peak_bytes == 0
    assert second.engine.read_bytes() == whole
    assert {*said} == {"reading m.engine, which was built before"}
    assert not again(workspace=1 << 20).cached
    assert not again(weight_streaming=True).cached
    assert again().cached
    kept = sorted(path.suffix for path in (tmp_path / "kept").iterdir())
    assert kept == [".engine"] * 3 + [".json"] * 3


def test_another_model_or_target_is_another_engine(tmp_path: Path) -> None:
    cache = tmp_path / "kept"
    path = relu(tmp_path / "m.onnx")
    assert not build(asked(path, caching=True, cache=cache)).cached
    other = Target.parse("tensorrt-rtx-1.7/sm_89")
    request = BuildRequest(path, tmp_path / "o.engine", other, cache=cache)
    built = build(request)
    assert not built.cached
    found = header.read(built.engine)
    assert found is not None and found.capabilities == (89,)
    nodes = [node("model/exp", "Exp", ["x"], "y")]
    save(path, nodes, [value("x", [4, 64])], [value("y", [4, 64])])
    assert not build(asked(path, caching=True, cache=cache)).cached


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    request = two_profiles(attention(tmp_path / "m.onnx"))
    build(request, lambda stage, fraction: told.append((stage, fraction)))
    assert {stage for stage, _ in told} == {"building m.engine"}
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert len({*fractions}) > 20


def outside(location: str, offset: int, length: int) -> onnx.TensorProto:
    tensor = TensorProto(name="W", data_type=TensorProto.FLOAT16, dims=[64, 128])
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(entry))
    return tensor


def external(folder: Path, location: str) -> Path:
    nodes = [node("model/linear", "MatMul", ["x", "W"], "y")]
    weights = [outside(location, 7, 64 * 128 * 2)]
    folder.mkdir(exist_ok=True)
    inputs, outputs = [value("x", [4, 64])], [value("y", [4, 128])]
    return save(folder / "m.onnx", nodes, inputs, outputs, weights)


def test_weights_lie_beside_the_model_or_below_a_base(tmp_path: Path) -> None:
    numbers = np.arange(64 * 128).astype(np.float16)
    base = tmp_path / "checkpoint"
    (base / "deep").mkdir(parents=True)
    (base / "deep" / "w.bin").write_bytes(b"\0" * 7 + numbers.tobytes())
    model = external(tmp_path / "a", "deep/w.bin")
    cache = tmp_path / "kept"
    built = build(asked(model, base=base, caching=True, cache=cache))
    assert numbers[:2000].tobytes() in built.engine.read_bytes()
    assert build(asked(model, base=base, caching=True, cache=cache)).cached
    numbers[5] = 77  # the model stays as it is, and its weights do not
    (base / "deep" / "w.bin").write_bytes(b"\0" * 7 + numbers.tobytes())
    changed = build(asked(model, base=base, caching=True, cache=cache))
    assert not changed.cached and numbers[:2000].tobytes() in changed.engine.read_bytes()


def test_weight_streaming_needs_no_gpu(tmp_path: Path) -> None:
    path = gemm(tmp_path / "m.onnx")
    one = profile("one", path, B=(1, 2, 4))
    plain = build(asked(path, [one])).engine.read_bytes()
    streaming = build(asked(path, [one], weight_streaming=True)).engine.read_bytes()
    assert streaming != plain


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    nodes = [node("model/relu", "Relu", ["x"], "y")]
    ports = [value("x", [4, 64], BF16)], [value("y", [4, 64], BF16)]
    report = build(asked(save(tmp_path / "m.onnx", nodes, *ports))).report
    assert [port.dtype for port in report.ports] == ["bf16", "bf16"]
