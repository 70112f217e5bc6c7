"""Nodes of plugins in ONNX files, read as the operations that the plugins name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.tensorrt.plugins import SPECS, attributes_of, load
from irc.driver import find_source, read_module
from irc.errors import Error
from irc.ir.declare import REGISTRY
from tests.fresh import fresh
from tests.tensorrt.graphs import model, node
from tests.user_code import EXAMPLE, restored_registries

NAMED = {"plugin_version": "1", "plugin_namespace": "example"}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with restored_registries():
        yield


def written(folder: Path, domain: str = "", /, **fields: Any) -> Path:
    """A model of one node of SoftCap, and one behind it."""
    body = [node("SoftCap", "x", "c", domain, **fields), node("Neg", "c")]
    path = folder / "m.onnx"
    path.write_bytes(model(body, "x:f32[4,N]", "y:f32[4,N]").SerializeToString())
    return path


@pytest.mark.parametrize("domain", ["", "example"])
def test_a_node_of_a_plugin_is_its_operation(domain: str, tmp_path: Path) -> None:
    load([EXAMPLE])
    fields = {"cap": "2.5"} if domain else {"cap": "2.5", **NAMED}
    path = written(tmp_path, domain, **fields)
    for module in (read_module(path), find_source(path).module):
        assert [op.opname for op in module.main] == ["soft_cap", "neg", "return"]
        x = fresh().standard_normal((4, 3)).astype(np.float32) * 5
        found = irc.evaluate(module, {"x": x})["y"]
        assert np.allclose(found, -2.5 * np.tanh(x / 2.5), rtol=1e-5)


def test_what_a_plugin_writes_is_read_again(tmp_path: Path) -> None:
    load([EXAMPLE])
    fields = attributes_of("SoftCap", {"cap": 0.1}, "example")
    first, *_ = read_module(written(tmp_path, **fields)).main
    assert first.attributes["cap"] == 0.1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({**NAMED, "cap": "x"}, "cap is 'x'; expected a number"),
        ({**NAMED}, "SoftCap needs the field 'cap'"),
        ({**NAMED, "cap": "2.0", "scale": "1"}, "SoftCap has no field 'scale'"),
        ({**NAMED, "cap": "-2.0"}, r"cap is -2\.0; it must be more than 0"),
        ({**NAMED, "cap": 2.0}, "its attribute cap is not text"),
        ({**NAMED, "cap": "2.0", "plugin_version": "9"}, "version 9 of the plugin SoftCap"),
        (
            {**NAMED, "cap": "2.0", "plugin_namespace": "mine"},
            "registered in its namespace, 'mine'",
        ),
    ],
)
def test_nodes_that_do_not_fit_the_plugin(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    load([EXAMPLE])
    with pytest.raises(Error, match=reason):
        read_module(written(tmp_path, **fields))


def test_plugins_without_an_operation(tmp_path: Path) -> None:
    path = written(tmp_path, cap="2.0", **NAMED)
    with pytest.raises(Error, match="it is a plugin's; name the file that registers that with"):
        read_module(path)
    load([EXAMPLE])
    declared = REGISTRY.pop("soft_cap")
    with pytest.raises(Error, match="its operation soft_cap is declared nowhere"):
        read_module(path)
    REGISTRY["soft_cap"] = declared
    SPECS["example", "SoftCap"] = replace(SPECS["example", "SoftCap"], operation="")
    with pytest.raises(Error, match="its PluginSpec names no operation; give it operation="):
        read_module(path)


def test_a_plugin_called_as_an_operator_leaves_that_alone(tmp_path: Path) -> None:
    load([EXAMPLE])
    SPECS["example", "Neg"] = replace(SPECS["example", "SoftCap"], name="Neg")
    module = read_module(written(tmp_path, cap="2.0", **NAMED))
    assert [op.opname for op in module.main] == ["soft_cap", "neg", "return"]
