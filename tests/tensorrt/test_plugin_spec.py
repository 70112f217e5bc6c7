"""Plugin specs: their fields, TensorRT's view of them, ONNX schemas, files."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from irc.backends.tensorrt import plugins
from irc.backends.tensorrt.lint.graph import skeleton, types_of
from irc.backends.tensorrt.plugins import Field, Instance, PluginSpec, Tensor
from irc.backends.tensorrt.plugins.adapter import field_texts, plugin_class
from irc.backends.tensorrt.plugins.spec import modules_of, users
from irc.errors import Error
from irc.extensions.user_files import is_users
from tests.tensorrt import plugin_host as host
from tests.user_code import EXAMPLE, restored_registries

TRT: Any = host  # in place of the library


@pytest.fixture(autouse=True)
def same_specs() -> Iterator[None]:
    """Plugins that a test registers are removed when it ends."""
    with restored_registries():
        yield
    plugins.take_failure()


def spec(**changes: Any) -> PluginSpec:
    """A plugin that doubles its first dim."""
    facts: dict[str, Any] = {
        "name": "Twice",
        "version": "2",
        "doc": "x, twice.",
        "fields": (Field("times", "int", doc="how often"), Field("note", default="", doc="a note")),
        "types": {"T": ("f32", "i64")},
        "inputs": (Tensor("x", "T"), Tensor("i", "i32")),
        "outputs": (Tensor("y", "T"), Tensor("n", "i64")),
        "shapes": lambda fields, x, i: ((x[0] * 2, *x[1:]), ()),
        "enqueue": lambda fields, inputs, outputs: lambda *arguments: None,
    }
    return PluginSpec(**(facts | changes))


@pytest.mark.parametrize("odd", ["enqueue", "nowhere", "partial"])
def test_which_plugins_are_of_users(odd: str) -> None:
    ours = plugins.find("IrcCollective")
    nowhere = eval("lambda *arguments: None", {})
    assert nowhere.__module__ is None
    enqueue = {"enqueue": ours.enqueue, "nowhere": nowhere, "partial": partial(ours.enqueue)}[odd]
    mine = plugins.register(spec(enqueue=enqueue))
    assert users() == [mine]
    with pytest.raises(Error, match="no file registers the plugin Twice"):
        plugins.files_of(["Twice"])
    own = {"shapes": ours.shapes, "enqueue": enqueue}
    assert is_users(modules_of(spec(**own))) == (odd == "nowhere")


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("text", "dp.tp", "dp.tp"),
        ("int", 2**40 + 1, "1099511627777"),
        ("int", -(2**63), "-9223372036854775808"),
        ("float", 1e-5, "1e-05"),
        ("float", 2, "2.0"),
    ],
)
def test_fields_are_carried_as_strings(kind: Any, value: Any, text: str) -> None:
    field = Field("f", kind)
    assert field.parsed(text) == field.parsed(value) == value
    assert str(field.parsed(value)) == text


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *[("int", text) for text in ("1.5", str(2**63), "x", "")],
        *[("float", "x"), ("int", 1.5), ("int", None), ("text", 3), ("text", "a\0")],
    ],
)
def test_values_of_another_type(kind: Any, value: Any) -> None:
    with pytest.raises(Error, match=r"f is .*; expected (an? |text)"):
        Field("f", kind).parsed(value)


def test_the_fields_of_a_plugin() -> None:
    twice = spec()
    plugin = Instance(twice, {"times": 2**40})
    assert plugin.texts() == {"times": str(2**40), "note": ""}
    assert Instance(twice, plugin.texts()).values == plugin.values
    assert plugin.clone().values == plugin.values
    with pytest.raises(Error, match="Twice needs the field 'times': how often"):
        Instance(twice, {})
    with pytest.raises(Error, match="Twice has no field 'tims'; did you mean 'times'"):
        Instance(twice, {"tims": 1})
    with pytest.raises(Error, match="Twice: times is 'x'; expected an integer of 64 bits"):
        Instance(twice, {"times": "x"})
    choosing = spec(fields=(Field("f", choices=("sum", "max")),))
    with pytest.raises(Error, match="f is 'smu'; expected sum, max; did you mean 'sum'"):
        Instance(choosing, {"f": "smu"})


def test_dtypes_follow_the_type_variables() -> None:
    plugin = Instance(spec(), {"times": 1})
    assert plugin.output_dtypes(["i64", "i32"]) == ("i64", "i64")
    with pytest.raises(Error, match="Twice: x is f16, expected f32 or i64"):
        plugin.output_dtypes(["f16", "i32"])
    with pytest.raises(Error, match=r"Twice: expected 2 inputs \(x, i\), found 1"):
        plugin.output_dtypes(["f32"])
    same = spec(inputs=(Tensor("x", "T"), Tensor("i", "T")))
    with pytest.raises(Error, match="i is i64, expected f32"):
        Instance(same, {"times": 1}).output_dtypes(["f32", "i64"])
    assert [plugin.supports(at, ["f32", "i32", "f32", "i64"]) for at in range(4)] == [True] * 4
    assert not plugin.supports(2, ["f32", "i32", "i64", "i64"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "two words"}, "needs an identifier as name"),
        ({"doc": " "}, "needs an identifier as name, a version, and a doc"),
        ({"fields": (Field("a"), Field("a"))}, "clash with each other"),
        ({"fields": (Field("plugin_version"),)}, "clash"),
        ({"types": {"T": ("f33",)}}, "no dtype called 'f33'; did you mean 'f32'"),
    ],
)
def test_specs_that_are_wrong(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Error, match=reason):
        plugins.register(spec(**changes))


def test_versions() -> None:
    plugins.register(spec())
    assert plugins.versions()["Twice"] == "2" and plugins.versions()["IrcCollective"] == "1"
    plugins.require({"Twice": "2", "IrcCollective": "1"})
    with pytest.raises(Error, match=r"expected version 3 of the plugin Twice, found version 2"):
        plugins.require({"Twice": "3"})
    with pytest.raises(Error, match=r"no plugin called 'Twise'.*'Twice'.* with --plugin"):
        plugins.require({"Twise": "1"})
    with pytest.raises(Error, match="there is a plugin Twice in the namespace 'irc' already"):
        plugins.register(spec())


# ------------------------------------------------------------------ TensorRT


def test_creators_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.register(spec())
    registry = host.Registry()
    monkeypatch.setattr(host, "get_plugin_registry", lambda: registry)
    assert plugins.register_creators(host).count("Twice") == 1
    assert plugins.register_creators(host) == []
    creator = registry.get_creator("Twice", "2", "irc")
    assert [field.name for field in creator.field_names] == ["times", "note"]
    data = np.frombuffer(b"7\0", np.int8)
    char = host.PluginFieldType.CHAR
    plugin = creator.create_plugin("n", [host.PluginField("times", data, char)], None)
    assert plugin.body.values == {"times": 7, "note": ""} and plugin.plugin_version == "2"
    with pytest.raises(Error, match="n: Twice has no field 'tims'"):
        creator.create_plugin("n", [host.PluginField("tims", data, char)], None)


def test_clones_keep_all_state_and_serialize_it() -> None:
    body = Instance(spec(), {"times": 2**40, "note": "here"})
    plugin = plugin_class(TRT)(body)
    again = plugin.clone().attach_to_context(None)
    assert type(again) is type(plugin) and again.body is not body
    assert field_texts(again.get_fields_to_serialize()) == body.texts()
    named = (again.plugin_name, again.plugin_version, again.plugin_namespace, again.num_outputs)
    assert named == ("Twice", "2", "irc", 2)


def test_types_formats_and_failures() -> None:
    values = {"operation": "all_gather", "group": "tp", "group_size": 2}
    plugin = plugin_class(TRT)(Instance(plugins.find("IrcCollective"), values), "l.0/gather")
    assert plugin.get_output_data_types([host.DataType.BF16]) == [host.DataType.BF16]
    with pytest.raises(Error, match="x is u8, expected f32 or"):
        plugin.get_output_data_types([host.DataType.UINT8])
    assert "l.0/gather: IrcCollective: x is u8" in str(plugins.take_failure())
    assert plugins.take_failure() is None
    linear, other = (
        SimpleNamespace(desc=host.PluginTensorDesc((4,), host.DataType.HALF, each))
        for each in (host.TensorFormat.LINEAR, host.TensorFormat.CHW4)
    )
    assert plugin.supports_format_combination(1, [linear, linear], 1)
    assert not plugin.supports_format_combination(0, [other, linear], 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"operation": "all_reduce"}, "reduce_op of all_reduce is sum, max, min or prod, not none"),
        ({"reduce_op": "sum"}, "reduce_op of all_gather is none, not sum"),
        ({"operation": "broadcast"}, "root of broadcast is a position from 0 to 1, not -1"),
        ({"operation": "gather", "root": 2}, "root of gather is a position from 0 to 1, not 2"),
        ({"root": 0}, "all_gather has no root, so root is -1, not 0"),
        ({"group": ""}, "group is empty"),
        ({"group_size": 0}, "group_size is 0; a group has at least one rank"),
        ({"operation": "all_reduce_rms_norm", "reduce_op": "max"}, "sums; reduce_op is max"),
        ({"operation": "all_gathr"}, "did you mean 'all_gather'"),
    ],
)
def test_fields_of_the_collective_that_contradict(fields: dict[str, Any], reason: str) -> None:
    values = {"operation": "all_gather", "group": "tp", "group_size": 2} | fields
    with pytest.raises(Error, match=reason):
        Instance(plugins.find("IrcCollective"), values)


# ------------------------------------------------------------------ ONNX


def node_model(*shape: Any, outputs: int = 1, **attributes: str) -> onnx.ModelProto:
    """A model of one IrcCollective node."""
    named = {"operation": "all_gather", "group": "tp", "group_size": "2"} | attributes
    named = {"plugin_version": "1", "plugin_namespace": "irc"} | named
    names = ["x", "residual", "weight"] if outputs == 2 else ["x"]
    kind = TensorProto.BFLOAT16
    inputs = [
        helper.make_tensor_value_info(n, kind, shape[-1:] if n == "weight" else shape)
        for n in names
    ]
    made = [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)]
    node = helper.make_node("IrcCollective", names, [o.name for o in made], name="here", **named)
    graph = helper.make_graph([node], "g", inputs, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def inferred(model: onnx.ModelProto) -> list[Any]:
    """The shapes of the outputs as the linter infers them; all are bf16."""
    (types,), trouble = types_of(skeleton(model), ())
    assert not trouble
    found = [types[each.name] for each in model.graph.output]
    assert {each.dtype for each in found} == {TensorProto.BFLOAT16}
    return [each.shape for each in found]


def test_the_linter_infers_types_and_shapes() -> None:
    assert inferred(node_model(3, 8)) == [(6, 8)]
    assert inferred(node_model("B", 8)) == [(None, 8)]
    scattered = {"operation": "reduce_scatter", "reduce_op": "sum"}
    assert inferred(node_model(4, 8, outputs=1, **scattered)) == [(2, 8)]
    fused = {"operation": "all_reduce_rms_norm", "reduce_op": "sum", "eps": "1e-05"}
    assert inferred(node_model("B", "S", 8, outputs=2, **fused)) == [("B", "S", 8)] * 2


def test_nodes_whose_fields_are_wrong() -> None:
    values = {"operation": "broadcast", "group": "dp.tp", "group_size": 4, "root": 3}
    texts = plugins.attributes_of("IrcCollective", values)
    assert texts["plugin_version"] == "1" and texts["plugin_namespace"] == "irc"
    assert texts["eps"] == "1e-06" and texts["root"] == "3"
    spec = plugins.find("IrcCollective")
    own = {name: text for name, text in texts.items() if not name.startswith("plugin_")}
    assert plugins.fields_of(spec, "1", own)["root"] == 3
    with pytest.raises(Error, match="group_size is 'two'; expected an integer of 64 bits"):
        plugins.fields_of(spec, "1", own | {"group_size": "two"})
    with pytest.raises(Error, match="expected version 7 of the plugin IrcCollective"):
        plugins.fields_of(spec, "7", own)


# ------------------------------------------------------------------ files


def test_the_example_loads_once() -> None:
    assert plugins.load([EXAMPLE]) == plugins.load([str(EXAMPLE)]) == ["SoftCap"]
    with pytest.raises(Error, match=r"SoftCap: cap is -1\.0"):
        Instance(plugins.find("SoftCap", namespace="example"), {"cap": -1.0})
    assert plugins.versions()["example::SoftCap"] == "1"
    plugins.require({"example::SoftCap": "1"})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1", "bad.py registers no plugin; call register"),
        ("x = 1\n1 / 0", "bad.py:2: ZeroDivisionError: division by zero"),
        ("def f(:", r"bad.py:1:7: error: not Python: invalid syntax"),
        ("raise SystemExit", "bad.py:1: SystemExit"),
        ("", r"there is no file '.*bad\.py' to load"),
    ],
)
def test_files_that_do_not_load(tmp_path: Path, source: str, reason: str) -> None:
    file = tmp_path / "bad.py"
    if source:
        file.write_text(source)
    before = dict(plugins.SPECS)
    with pytest.raises(Error, match=reason):
        plugins.load([file])
    assert before == plugins.SPECS
