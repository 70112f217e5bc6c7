"""A PluginSpec and everything that is made from it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks import plays_tensorrt as played
from irc.backends.tensorrt import plugins
from irc.backends.tensorrt.plugins import Field, Instance, PluginSpec, Tensor
from irc.backends.tensorrt.plugins.adapter import creator_class, field_texts, plugin_class
from irc.backends.tensorrt.plugins.fields import REQUIRED
from irc.backends.tensorrt.plugins.load import users
from irc.backends.tensorrt.plugins.schema import plugin_of_node, schema_of
from irc.backends.tensorrt.plugins.spec import homes
from irc.dtypes import DTYPES
from irc.errors import Error
from irc.user_files import is_users
from tests.fresh import fresh
from tests.user_code import EXAMPLE, taken_back


@pytest.fixture(autouse=True)
def same_specs() -> Iterator[None]:
    """What a test registers goes with it."""
    with taken_back():
        yield
    plugins.take_failure()


def spec(**changes: Any) -> PluginSpec:
    """A plugin that doubles its first dim."""
    facts: dict[str, Any] = {
        "name": "Twice",
        "version": "2",
        "doc": "x, twice over.",
        "fields": (
            Field("times", "int", doc="how often"),
            Field("blob", "bytes", b"", doc="carried along"),
            Field("sizes", "ints", (), doc="carried along"),
        ),
        "types": {"T": ("f32", "i64")},
        "inputs": (Tensor("x", "T"), Tensor("i", "i32")),
        "outputs": (Tensor("y", "T"), Tensor("n", "i64")),
        "shapes": lambda fields, x, i: ((2 * x[0] + 0, *x[1:]), ()),
        "meaning": lambda fields, x, i: (np.concatenate([x, x]), np.int64(1)),
        "enqueue": lambda fields, inputs, outputs: lambda *arguments: None,
    }
    return PluginSpec(**(facts | changes))


@pytest.mark.parametrize("odd", ["enqueue", "nowhere", "partial"])
def test_a_plugin_is_a_user_s_unless_all_of_it_is_irc_s(odd: str) -> None:
    ours = plugins.find("IrcCollective")
    nowhere = eval("lambda *given: None", {})
    assert nowhere.__module__ is None
    enqueue = {"enqueue": ours.enqueue, "nowhere": nowhere, "partial": partial(ours.enqueue)}[odd]
    mine = plugins.register(spec(enqueue=enqueue))
    assert users() == [mine]
    with pytest.raises(Error, match="no file registers the plugin Twice"):
        plugins.files_of(["Twice"])
    own = {"shapes": ours.shapes, "meaning": ours.meaning, "enqueue": enqueue}
    assert is_users(homes(spec(**own))) == (odd == "nowhere")


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("text", "dp.tp", "dp.tp"),
        ("int", 2**40 + 1, "1099511627777"),
        ("int", -(2**63), "-9223372036854775808"),
        ("float", 1e-5, "1e-05"),
        ("bool", True, "1"),
        ("ints", (1, -(2**33)), "1,-8589934592"),
        ("ints", (), ""),
        ("bytes", b"\0\xff", "AP8="),
    ],
)
def test_fields_travel_as_text(kind: Any, value: Any, text: str) -> None:
    field = Field("f", kind)
    assert field.encode(value) == text
    assert field.decode(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("int", "1.5"),
        ("int", str(2**63)),
        ("float", "x"),
        ("bool", "2"),
        ("ints", "1,,2"),
        ("int", ""),
    ],
)
def test_texts_that_are_no_value(kind: Any, text: str) -> None:
    with pytest.raises(Error, match=r"f is .*, and '.*' is none"):
        Field("f", kind).decode(text)


def test_choices_and_the_default() -> None:
    field = Field("f", choices=("sum", "max"), default="sum")
    assert not field.required and Field("f").required and repr(REQUIRED) == "required"
    with pytest.raises(Error, match="f is one of sum, max, and not 'smu'; did you mean 'sum'"):
        field.decode("smu")


def test_the_fields_of_a_plugin() -> None:
    twice = spec()
    plugin = Instance(twice, {"times": 2**40, "blob": b"ab"})
    assert plugin.texts() == {"times": str(2**40), "blob": "YWI=", "sizes": ""}
    assert Instance.from_texts(twice, plugin.texts()).values == plugin.values
    assert plugin.clone().values == plugin.values
    with pytest.raises(Error, match="Twice needs the field 'times': how often"):
        Instance(twice, {})
    with pytest.raises(Error, match="Twice has no field 'tims'; did you mean 'times'"):
        Instance(twice, {"tims": 1})
    with pytest.raises(Error, match="Twice: times is an integer of 64 bits, and 'x' is none"):
        Instance.from_texts(twice, {"times": "x"})


def test_dtypes_follow_the_type_variables() -> None:
    plugin = Instance(spec(), {"times": 1})
    assert plugin.output_dtypes(["i64", "i32"]) == ("i64", "i64")
    with pytest.raises(Error, match="Twice: x is f16, not f32 or i64"):
        plugin.output_dtypes(["f16", "i32"])
    with pytest.raises(Error, match=r"Twice takes 2 inputs \(x, i\), not 1"):
        plugin.output_dtypes(["f32"])
    same = spec(inputs=(Tensor("x", "T"), Tensor("i", "T")))
    with pytest.raises(Error, match="i is i64, but must be f32 as the inputs before it"):
        Instance(same, {"times": 1}).output_dtypes(["f32", "i64"])
    assert [plugin.supports(at, ["f32", "i32", "f32", "i64"]) for at in range(4)] == [True] * 4
    assert not plugin.supports(2, ["f32", "i32", "i64", "i64"])


def test_the_numpy_reference() -> None:
    x = fresh().standard_normal((3, 2)).astype(np.float32)
    ((y, n),) = plugins.evaluate(spec(), {"times": 1}, [(x, np.int32(0))])
    assert np.array_equal(y, np.concatenate([x, x])) and n == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "two words"}, "needs a name that is a word"),
        ({"doc": " "}, "needs a name"),
        ({"reads": {"2": dict}}, "reads names older versions, and 2 is its own"),
        ({"fields": (Field("a"), Field("a"))}, "clash with each other"),
        ({"fields": (Field("plugin_version"),)}, "clash"),
        ({"types": {"T": ("f33",)}}, "no dtype 'f33'; did you mean 'f32'"),
    ],
)
def test_specs_that_cannot_be_right(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Error, match=reason):
        plugins.register(spec(**changes))


def test_versions() -> None:
    plugins.register(spec(reads={"1": lambda texts: {"times": texts["count"]}}))
    assert plugins.versions()["Twice"] == "2" and plugins.versions()["IrcCollective"] == "1"
    plugins.require({"Twice": "1", "IrcCollective": "1"})
    with pytest.raises(Error, match=r"version 3 of the plugin Twice is wanted, and here is .* 2"):
        plugins.require({"Twice": "3"})
    with pytest.raises(Error, match=r"no plugin called 'Thrice'.*'Twice'.* with --plugin"):
        plugins.require({"Thrice": "1"})
    with pytest.raises(Error, match="there is a plugin Twice in the namespace 'irc' already"):
        plugins.register(spec())


def test_an_engine_of_an_older_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = plugins.register(spec(reads={"1": lambda texts: {"times": texts["count"]}}))
    registry = played.Registry()
    monkeypatch.setattr(played, "get_plugin_registry", lambda: registry)
    assert plugins.register_creators(played).count("Twice") == 2
    assert plugins.register_creators(played) == []
    old = registry.get_creator("Twice", "1", "irc")
    plugin = old.create_plugin("n", [played.PluginField("count", data("7"), CHAR)], None)
    assert plugin.body.values["times"] == 7 and plugin.plugin_version == "1"
    assert registry.get_creator("Twice", "3", "irc") is None
    assert creator_class(played)(twice, "2").field_names[0].name == "times"


CHAR = played.PluginFieldType.CHAR


def data(text: str) -> np.ndarray:
    """As a string arrives: with a NUL."""
    return np.frombuffer(text.encode() + b"\0", np.int8)


def test_clones_keep_all_state_and_fields_come_back() -> None:
    body = Instance(spec(), {"times": 2**40, "blob": bytes(range(256)), "sizes": (1, 2)})
    plugin = plugin_class(played)(body)
    again = plugin.clone().attach_to_context(None)
    assert type(again) is type(plugin) and again.body is not body
    assert field_texts(again.get_fields_to_serialize()) == body.texts()
    assert (again.plugin_name, again.plugin_version, again.plugin_namespace) == (
        "Twice",
        "2",
        "irc",
    )
    assert again.num_outputs == 2


def test_a_plugin_for_the_network_api() -> None:
    values = {"operation": "all_gather", "group": "tp", "ways": 2}
    plugin = plugins.make_plugin(played, "IrcCollective", values)
    assert plugin.get_output_data_types([played.DataType.BF16]) == [played.DataType.BF16]
    with pytest.raises(Error, match="x is u8, not f32 or"):
        plugin.get_output_data_types([played.DataType.UINT8])
    assert "x is u8" in str(plugins.take_failure()) and plugins.take_failure() is None
    linear = SimpleNamespace(desc=played.PluginTensorDesc((4,), played.DataType.HALF))
    other = SimpleNamespace(
        desc=played.PluginTensorDesc((4,), played.DataType.HALF, played.TensorFormat.CHW4)
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
        ({"ways": 0}, "ways is 0; a group has at least one rank"),
        ({"operation": "all_reduce_rms_norm", "reduce_op": "max"}, "sums; reduce_op is max"),
        ({"operation": "all_gathr"}, "not 'all_gathr'; did you mean 'all_gather'"),
    ],
)
def test_fields_of_the_collective_that_contradict(fields: dict[str, Any], reason: str) -> None:
    given = {"operation": "all_gather", "group": "tp", "ways": 2} | fields
    with pytest.raises(Error, match=reason):
        Instance(plugins.find("IrcCollective"), given)


def node_model(*shape: Any, outputs: int = 1, **attributes: str) -> onnx.ModelProto:
    """A model of one IrcCollective node."""
    named = {"operation": "all_gather", "group": "tp", "ways": "2"} | attributes
    named = {"plugin_version": "1", "plugin_namespace": "irc"} | named
    names = ["x", "residual", "weight"] if outputs == 2 else ["x"]
    kind = TensorProto.BFLOAT16
    inputs = [
        helper.make_tensor_value_info(n, kind, shape[-1:] if n == "weight" else shape)
        for n in names
    ]
    made = [
        helper.make_tensor_value_info(f"y{i}", kind, [None] * len(shape)) for i in range(outputs)
    ]
    node = helper.make_node("IrcCollective", names, [o.name for o in made], name="here", **named)
    graph = helper.make_graph([node], "g", inputs, made)
    opset = helper.make_opsetid("", 24)
    return helper.make_model(graph, opset_imports=[opset], ir_version=11)


def inferred(model: onnx.ModelProto) -> list[list[Any]]:
    plugins.register_schemas()
    onnx.checker.check_model(model, full_check=True)
    found = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    return [
        [d.dim_value or d.dim_param for d in out.type.tensor_type.shape.dim]
        for out in found.graph.output
    ]


def test_onnx_knows_the_node() -> None:
    assert inferred(node_model(3, 8)) == [[6, 8]]
    assert inferred(node_model("B", 8))[0][1:] == [8]
    fused = {"operation": "all_reduce_rms_norm", "reduce_op": "sum", "eps": "1e-05"}
    assert inferred(node_model("B", "S", 8, outputs=2, **fused)) == [["B", "S", 8]] * 2
    for bad, reason in (
        (node_model(3, 8, operation="all_to_all"), "cuts dimension 0, which is 3, into 2 parts"),
        (node_model(3, 8, ways="two"), "ways is an integer of 64 bits, and 'two' is none"),
        (node_model(3, 8, plugin_version="9"), "version 9 of the plugin IrcCollective is wanted"),
    ):
        with pytest.raises(onnx.shape_inference.InferenceError, match=reason):
            onnx.shape_inference.infer_shapes(bad, strict_mode=True)


def test_a_node_as_a_plugin() -> None:
    values = {"operation": "broadcast", "group": "dp.tp", "ways": 4, "root": 3}
    texts = plugins.attributes_of("IrcCollective", values)
    assert texts["plugin_version"] == "1" and texts["plugin_namespace"] == "irc"
    assert texts["eps"] == "1e-06" and texts["root"] == "3"
    node = helper.make_node("IrcCollective", ["x"], ["y"], name="layers.0/x", **texts)
    assert plugin_of_node(node).values["root"] == 3
    bad = helper.make_node("IrcCollective", ["x"], ["y"], name="layers.0/x", **{**texts, "root": 3})
    with pytest.raises(Error, match=r"layers\.0/x: the attribute root has to be a string"):
        plugin_of_node(bad)
    other = helper.make_node("IrcCollective", ["x"], ["y"], **{**texts, "plugin_version": "7"})
    with pytest.raises(Error, match="version 7 of the plugin IrcCollective is wanted"):
        plugin_of_node(other)


def test_a_schema_has_what_the_spec_has() -> None:
    schema = schema_of(spec())
    assert [each.name for each in schema.inputs] == ["x", "i"]
    assert schema.attributes["times"].required and not schema.attributes["blob"].required
    every = spec(types={"T": tuple(DTYPES)})
    assert schema_of(every).type_constraints


def test_the_page_of_a_plugin() -> None:
    page = plugins.describe(spec(reads={"1": dict}))
    for wanted in (
        "# Twice",
        "version 2, namespace `irc`",
        "| `times` | int | required | how often |",
    ):
        assert wanted in page
    assert "| `blob` | bytes | empty |" in page and "Engines of version 1 are read too." in page
    assert "| `T` | f32 i64 |" in page and "| output | `n` | i64 |" in page
    ours = plugins.describe(plugins.find("IrcCollective"))
    assert "all_reduce_rms_norm" in ours and "Needs a communicator" in ours


def test_the_example_loads_and_means_what_it_says() -> None:
    assert plugins.load([EXAMPLE]) == ["SoftCap"]
    assert plugins.load([str(EXAMPLE)]) == ["SoftCap"]
    softcap = plugins.find("SoftCap", namespace="example")
    x = fresh().standard_normal(1000).astype(np.float32) * 100
    ((y,),) = plugins.evaluate(softcap, {"cap": 30.0}, [(x,)])
    assert np.allclose(y, 30 * np.tanh(x / 30), rtol=1e-5) and abs(y).max() <= 30
    with pytest.raises(Error, match=r"SoftCap: cap is -1\.0"):
        Instance(softcap, {"cap": -1.0})
    assert plugins.versions()["example::SoftCap"] == "1"
    plugins.require({"example::SoftCap": "1"})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1", "bad.py registers no plugin; call register"),
        ("x = 1\n1 / 0", "bad.py:2: ZeroDivisionError: division by zero"),
        ("def f(:", "bad.py:1: SyntaxError"),
        ("raise SystemExit", "bad.py:1: SystemExit"),
    ],
)
def test_files_that_do_not_load(tmp_path: Path, source: str, reason: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    before = dict(plugins.SPECS)
    with pytest.raises(Error, match=reason):
        plugins.load([file])
    assert before == plugins.SPECS


def test_a_file_that_is_missing() -> None:
    with pytest.raises(Error, match=r"there is no file 'gone\.py' to load"):
        plugins.load(["gone.py"])
