"""The graph view of a module: `module.to_networkx()`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import networkx

import irc
from irc.ir.core import Op
from tests.layout import ROOT

LAYER = """module @m {
  weight @w : f32[4, 4] = random("w", 1, 0.5)
  func @forward(%x: f32[B, 4]) -> (y: f32[B, 4]) {
    %h = linear %x, @w : f32[B, 4] loc("mlp.py":3 "layers.0.up")
    %s = mul %h, %h : f32[B, 4]
    %y = add %s, %x : f32[B, 4]
    return %y
  }
}"""
STAGES = """module @m mesh(pp=2) {
  func @stage0(%x: f32[B]) -> (a: f32[B]) {
    %a = exp %x : f32[B]
    return %a
  }
  func @forward(%x: f32[B]) -> (y: f32[B]) {
    %y = call %x {callee=@stage0, stage=0} : f32[B]
    return %y
  }
}"""


def test_nodes_and_edges_say_what_the_text_says() -> None:
    module = irc.parse(LAYER)
    graph = module.to_networkx()
    linear, square, *_ = module.main
    assert graph.nodes[linear] == {
        "kind": "operation", "name": "linear", "attributes": {}, "scope": "layers.0.up",
        "source": "mlp.py:3 in layers.0.up", "function": "forward", "stage": -1,
    }  # fmt: skip
    (weight,) = module.weights.values()
    assert graph.nodes[weight]["kind"] == "weight" and graph.nodes[weight]["name"] == "@w"
    assert graph.nodes[linear.result]["type"] == "f32[B, 4]"
    assert graph.edges[linear.result, square]["operands"] == ("x", "y")
    kinds = Counter(data["kind"] for _, data in graph.nodes(data=True))
    assert kinds == {"operation": 4, "value": 3, "argument": 1, "weight": 1}
    longest = [node.opname for node in networkx.dag_longest_path(graph) if isinstance(node, Op)]
    assert longest == ["linear", "mul", "add", "return"]
    assert module.main.args[0] not in networkx.descendants(graph, weight)


def test_operations_of_a_stage_have_its_number() -> None:
    module = irc.parse(STAGES)
    stages = {
        data["name"]: data["stage"]
        for _, data in module.to_networkx().nodes(data=True)
        if data["kind"] == "operation" and data["name"] != "return"
    }
    assert stages == {"exp": 0, "call": 0}


def test_a_compile_does_without_networkx(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(LAYER)
    words = ["compile", str(tmp_path / "m.irc"), "-o", str(tmp_path / "out")]
    code = (
        "import sys; from irc.cli.main import main; "
        f"assert main({words!r}) == 0; assert 'networkx' not in sys.modules"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert answer.returncode == 0, answer.stderr
