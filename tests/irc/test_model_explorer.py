"""Graphs for Model Explorer: the fields of its schema, edges as in networkx, scopes as layers."""

from pathlib import Path
from typing import Any

import pytest

from irc.cli.sources import read_module
from irc.ir.core import Module, Op, Weight
from irc.model_explorer.main import graphs_of
from tests.cli.conftest import MODULE

# of graph_builder.py of ai-edge-model-explorer 0.1.34, with what is not optional
NODE = {"id", "label", "namespace", "subgraphIds", "attrs", "incomingEdges", "outputsMetadata"}
NODE |= {"inputsMetadata", "style", "config"}
EDGE = {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"}


def check_form(graphs: list[dict[str, Any]]) -> None:
    assert len({graph["id"] for graph in graphs}) == len(graphs)
    for graph in graphs:
        nodes = {node["id"]: node for node in graph["nodes"]}
        assert len(nodes) == len(graph["nodes"])
        for node in graph["nodes"]:
            assert {"id", "label"} <= {*node} <= NODE
            for edge in node.get("incomingEdges", ()):
                assert {*edge} == EDGE and edge["sourceNodeId"] in nodes
                outputs = nodes[edge["sourceNodeId"]]["outputsMetadata"]
                assert edge["sourceNodeOutputId"] in [output["id"] for output in outputs]
            for part in node["outputsMetadata"]:
                assert {*part} == {"id", "attrs"}
            for each in node.get("attrs", ()):
                assert {*each} == {"key", "value"} and isinstance(each["value"], str)
            assert {*node.get("subgraphIds", ())} <= {each["id"] for each in graphs}


def edges_of(module: Module) -> int:
    graph = module.to_networkx()
    return sum(
        len(graph.edges[value, op]["operands"])
        for value, op in graph.edges
        if isinstance(op, Op) and not isinstance(value, Weight)
    )


@pytest.mark.parametrize("mesh", ["artifact", "two_ranks"])
def test_graphs_have_every_operation_and_edge(mesh: str, request: pytest.FixtureRequest) -> None:
    module = read_module(str(request.getfixturevalue(mesh)))
    graphs = graphs_of(module)
    check_form(graphs)
    nodes = [node for graph in graphs for node in graph["nodes"]]
    assert len(nodes) == len(list(module.ops())) + len(module.main.args)
    assert sum(len(node.get("incomingEdges", ())) for node in nodes) == edges_of(module)
    (down,) = (
        n
        for n in nodes
        if n.get("namespace") == "model/layers/1/mlp/down_proj" and n["label"] == "linear"
    )
    facts = {each["key"]: each["value"] for each in down["attrs"]}
    assert facts["weight"].startswith("@model.layers.1.mlp.down_proj.weight f32[32, ")
    assert "decoder.py:" in facts["source"]


def test_calls_lead_to_graphs(checkpoint: Path, tmp_path: Path) -> None:
    from tests.cli.runner import works

    works("compile", checkpoint, "-o", tmp_path / "out", "--mesh", "pp=2")
    graphs = graphs_of(read_module(str(tmp_path / "out")))
    check_form(graphs)
    calls = [n["subgraphIds"] for graph in graphs for n in graph["nodes"] if n["label"] == "call"]
    assert len(calls) == 2 and calls[0] != calls[1]


def test_model_explorer_loads_the_adapter(tmp_path: Path) -> None:
    """With the real package; skipped without it, as it brings half a gigabyte."""
    pytest.importorskip("model_explorer")
    from model_explorer.extension_manager import ExtensionManager  # pyright: ignore

    (tmp_path / "m.irc").write_text(MODULE)
    manager: Any = ExtensionManager(["irc.model_explorer"])
    manager.load_extensions()
    assert "irc" in [each["id"] for each in manager.get_extensions_metadata()]
    command = {"cmdId": "convert", "extensionId": "irc", "settings": {}}
    found = manager.run_cmd(command | {"modelPath": str(tmp_path / "m.irc")})
    (collection,) = found["graphCollections"]
    assert collection["label"] == "m"
    check_form(collection["graphs"])
