"""The builder's listing of kernels becomes a report, and progress becomes a fraction."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from irc.artifact import silent
from irc.backends.tensorrt.builder.cache import Cache, key_of
from irc.backends.tensorrt.builder.layers import Listing, layers_of, ports_of
from irc.backends.tensorrt.builder.model import operation_of
from irc.backends.tensorrt.builder.progress import Phases, monitor
from irc.backends.tensorrt.builder.report import Report

HALF = "Strides: [64,1], StrideOrder: [1,0], Datatype: Half, Format: (Linear) Row major"
LISTING = f"""Layers:
Name: __mye30_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], \
TacticName: , StreamId: 0, Metadata:\x20
Name: l.0/mm/MatMul.a_myl0_1, LayerType: gemm, Inputs: [ {{ Name: x, Dimensions: [-1,64], {HALF} \
linear format }}], Constants: [ {{ Name: W, Dimensions: [64,128], {HALF} }}], Outputs: [ {{ Name: \
y, Dimensions: [-1,128], {HALF} }}], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: \
[ONNX Layer: l.0/mm/MatMul.a]\x1f[ONNX Layer: l.0/relu/Relu.y[0]]
Name: own, LayerType: DistCollective, Inputs: [ {{ Name: x, Location: Device, Dimensions: [], \
Datatype: Float, Format: none }}], Outputs: [ {{ Name: a, Location: Device, Dimensions: [4], \
Datatype: BFloat16, Format: none }}], TacticValue: 0x0000000000000000, StreamId: 0, Metadata: \
[ONNX Layer: m/g/DistCollective.a]
Name: __mye_0_myl1_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], \
TacticName: , StreamId: 0, Metadata:\x20
Name: __myl_Relu_myl1_1, LayerType: kgen, Inputs: [ {{ Name: x [profile 1], Dimensions: [-1,64], \
{HALF} }}], Constants: [], Outputs: [], TacticName: __myl_Relu_0x6a, StreamId: 0, Metadata:\x20
Something that no version so far has printed

I/O Tensors:
 Name: x, IOMode: Input, DataType: Half, Dimensions: [-1,64], Location: Device, \
IsShapeInferenceIO: false, ProfileInfo: [ {{ MinShape: [1,64], OptShape: [2,64], MaxShape: [4,64], \
Format: f }}, {{ MinShape: [1,64], OptShape: [8,64], MaxShape: [9,64], Format: f }}]
 Name: n, IOMode: Input, DataType: Int64, Dimensions: [], Location: Host, \
IsShapeInferenceIO: true, ProfileInfo: []
 Name: y, IOMode: Output, DataType: FP8, Dimensions: [-1,128], Location: Device, \
IsShapeInferenceIO: false, ProfileInfo: [ {{ Format: f }}]

Engine Metadata:
 Multi-Device: Enabled
"""


def listed() -> Report:
    listing = Listing()
    for text in (
        "Max Scratch Memory: 10 bytes",
        "Total Activation Memory: 100 bytes",
        "Max Scratch Memory: 20 bytes",
        "Total Activation Memory: 200 bytes",
        "Total Weights Memory: 16640 bytes",
        LISTING,
        "Layers are fine",
    ):
        listing.hear(text)
    return listing.report("TensorRT-RTX 1.7", "tensorrt-rtx-1.7/sm_89", ("decode", "prefill"), 7)


def test_kernels_of_a_listing() -> None:
    layers = [*layers_of(LISTING)]
    kinds = ["shape_call", "gemm", "DistCollective", "shape_call", "kgen", "unknown"]
    assert [layer.kind for layer in layers] == kinds
    assert [layer.profile for layer in layers] == [0, 0, 0, 1, 1, 1]
    gemm, collective = layers[1], layers[2]
    assert gemm.nodes == ("l.0/mm/MatMul.a", "l.0/relu/Relu.y[0]")
    assert gemm.operations == ("l.0/mm", "l.0/relu")
    assert gemm.constants[0].dims == (64, 128) and gemm.tactic == ""
    assert collective.inputs[0].dims == () and collective.outputs[0].dtype == "bf16"
    assert layers[4].tactic == "__myl_Relu_0x6a" and layers[4].inputs[0].name == "x"
    assert layers[5].name == "Something that no version so far has printed"


def test_ports_of_a_listing() -> None:
    x, n, y = ports_of(LISTING)
    assert x.ranges == (((1, 64), (2, 64), (4, 64)), ((1, 64), (8, 64), (9, 64)))
    assert (n.dims, n.dtype, n.shape_values) == ((), "i64", True)
    assert (y.is_input, y.dtype, y.ranges) == (False, "f8e4m3", ())


def test_a_report_survives_json_and_answers_questions() -> None:
    report = listed()
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert [(m.profile, m.activation, m.scratch) for m in report.memory] == [
        (0, 100, 10),
        (1, 200, 20),
    ]
    assert report.weights == 16640 and report.multi_device and report.engine_bytes == 7
    assert report.kinds("prefill") == {"shape_call": 1, "kgen": 1, "unknown": 1}
    assert len(report.layers_of("l.0")) == len(report.layers_of("relu")) == 1
    assert not report.layers_of("mm", "prefill")
    assert report.rows("decode") == [
        ("gemm", "f16", "l.0/mm/MatMul.a_myl0_1", "l.0/mm, l.0/relu"),
        ("DistCollective", "bf16", "own", "m/g"),
    ]


@pytest.mark.parametrize(
    ("node", "operation"),
    [
        ("model.layers.0/linear/MatMul.a", "model.layers.0/linear"),
        ("linear/MatMul.model/a.b", "linear"),
        ("model.layers.0/linear/Reshape.model.layers.0/x", "model.layers.0/linear"),
        ("node_of_y", "node_of_y"),
    ],
)
def test_operations_of_nodes(node: str, operation: str) -> None:
    assert operation_of(node) == operation


def test_nested_phases_add_up() -> None:
    phases = Phases()
    phases.start("engine", None, 4)
    phases.step("engine", 0)
    assert phases.fraction == 0.25
    phases.start("graph", "engine", 2)
    phases.step("graph", 0)
    assert phases.fraction == 0.375
    phases.finish("graph")
    assert phases.fraction == 0.5
    phases.start("costs", "engine", 10)
    phases.step("costs", 99)
    phases.step("never started", 1)
    assert phases.fraction == 0.75
    phases.finish("costs")
    phases.finish("engine")
    assert phases.fraction == 1


def test_phases_never_go_back() -> None:
    phases = Phases()
    phases.start("a", None, 2)
    phases.step("a", 0)
    assert phases.fraction == 0.5
    phases.finish("a")
    phases.start("b", None, 2)
    assert phases.fraction == 1


def test_a_monitor_tells_and_stops_what_is_cancelled() -> None:
    told: list[float] = []
    cancelled = threading.Event()
    library = SimpleNamespace(IProgressMonitor=type("Base", (), {}))
    found = monitor(library, told.append, cancelled)
    found.phase_start("engine", None, 4)
    assert found.step_complete("engine", 1) is True
    cancelled.set()
    assert found.step_complete("engine", 2) is False
    found.phase_finish("engine")
    assert told == [0.5, 0.75, 1.0]


def test_the_cache_makes_room_by_dropping_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=250)
    engine = tmp_path / "built"
    engine.write_bytes(bytes(100))
    for age, key in ((30, "a"), (20, "b")):
        cache.keep(key, engine, listed(), silent)
        os.utime(tmp_path / f"{key}.json", (age, age))
    target = tmp_path / "taken"
    taken = cache.take("a", target, silent)
    assert taken is not None and taken.report == listed()
    assert target.read_bytes() == bytes(100)
    engine = tmp_path / "other"
    engine.write_bytes(bytes(120))
    cache.keep("c", engine, replace(listed(), weights=1), silent)
    assert {path.stem for path in tmp_path.glob("*.engine")} == {"a", "c"}
    assert {path.stem for path in tmp_path.glob("*.json")} == {"a", "c"}
    assert cache.take("b", target, silent) is None


def test_keys_do_not_depend_on_the_order_of_facts() -> None:
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
