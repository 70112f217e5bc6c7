"""The report of kernels from the builder's log; progress from its phases."""

import json
from types import SimpleNamespace

from irc.backends.tensorrt.builder.child import make_monitor
from irc.backends.tensorrt.builder.report import Listing, Report

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
Something in another format

I/O Tensors:
 Name: x, IOMode: Input, DataType: Half, Dimensions: [-1,64], Location: Device
"""


def report() -> Report:
    """The report of what the builder logs."""
    listing = Listing()
    for text in (
        "Max Scratch Memory: 10 bytes",
        "Total Activation Memory: 100 bytes",
        "Total Activation Memory: 200 bytes",
        LISTING,
        "Layers are fine",
    ):
        listing.add(text)
    names = [{"name": name} for name in ("decode", "prefill")]
    return listing.report({"library": "TensorRT-RTX 1.7", "target": "rtx", "profiles": names})


def test_layers_of_a_listing() -> None:
    layers = report().layers
    kinds = ["shape_call", "gemm", "DistCollective", "shape_call", "kgen", "unknown"]
    assert [layer.kind for layer in layers] == kinds
    assert [layer.profile for layer in layers] == [0, 0, 0, 1, 1, 1]
    gemm, collective = layers[1], layers[2]
    assert gemm.nodes == ("l.0/mm/MatMul.a", "l.0/relu/Relu.y[0]")
    assert gemm.operations == ("l.0/mm", "l.0/relu") and gemm.tactic == ""
    assert [(t.name, t.dims) for t in gemm.outputs] == [("y", (-1, 128))]
    assert collective.inputs[0].dims == () and collective.outputs[0].dtype == "bf16"
    assert layers[4].tactic == "__myl_Relu_0x6a" and layers[4].inputs[0].name == "x"
    assert layers[5].name == "Something in another format"


def test_a_report_reads_back_and_selects_kernels() -> None:
    found = report()
    assert (found.library, found.target, found.activations) == (
        "TensorRT-RTX 1.7",
        "rtx",
        (100, 200),
    )
    assert Report.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.kinds("prefill") == {"shape_call": 1, "kgen": 1, "unknown": 1}
    assert len(found.layers_of("l.0")) == len(found.layers_of("relu")) == 1
    assert not found.layers_of("mm", "prefill")
    assert found.rows("decode") == [
        ("gemm", "f16", "l.0/mm/MatMul.a_myl0_1", "l.0/mm, l.0/relu"),
        ("DistCollective", "bf16", "own", "m/g"),
    ]


def test_nested_phases_add_up() -> None:
    sent: list[float] = []
    library = SimpleNamespace(IProgressMonitor=type("Base", (), {}))
    monitor = make_monitor(library, lambda fraction: sent.append(fraction))
    monitor.phase_start("engine", None, 4)
    assert monitor.step_complete("engine", 0) is True
    monitor.phase_start("graph", "engine", 2)
    monitor.step_complete("graph", 0)
    monitor.phase_finish("graph")
    monitor.step_complete("engine", 1)
    monitor.phase_start("costs", "engine", 1000)
    monitor.step_complete("costs", 1)  # less than half a percent more
    monitor.step_complete("costs", 499)
    monitor.step_complete("costs", 99)  # out of order
    monitor.phase_finish("costs")
    monitor.phase_finish("never started")
    monitor.step_complete("never started", 1)
    monitor.step_complete("engine", 3)
    assert sent == [0.25, 0.375, 0.5, 0.625, 1.0]
