"""The ranges that engines need of a module's symbols."""

from __future__ import annotations

from pathlib import Path

import pytest

from irc.backends.tensorrt.ranges import profiles_of
from irc.errors import Error
from irc.text import parse_module
from tests.cli.runner import refused

MODULE = """module @m {{
  func @forward(%x: f32[{0}], %y: f32[{1}]) -> (a: f32[{0}], b: f32[{1}]) {{
    %a = relu %x : f32[{0}]
    %b = relu %y : f32[{1}]
    return %a, %b
  }}
}}
"""


def test_all_symbols_without_a_range_are_named_at_once() -> None:
    functions = [parse_module(MODULE.format(*each)).main for each in (("B, 4", "S"), ("B", "2*T"))]
    with pytest.raises(Error) as caught:
        profiles_of(functions, {"S": (1, 2, 4)})
    wanted = "B=min:typical:max,T=min:typical:max"
    assert str(caught.value) == f"an engine needs ranges for B, T; give --dims {wanted}"
    with pytest.raises(Error, match=r"needs a range for T; give --dims T=min:typical:max$"):
        profiles_of(functions, {"S": (1, 2, 4), "B": (1, 1, 1)})
    found = profiles_of(functions, dict.fromkeys("BST", (1, 2, 4)))
    assert found[1][0].shapes == {"x": ((1,), (2,), (4,)), "y": ((2,), (4,), (8,))}


@pytest.mark.parametrize("dry", [False, True])
def test_the_commands_say_so(dry: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.irc"
    path.write_text(MODULE.format("B, 4", "S"))
    words = ("compile", path, "--backend", "tensorrt-rtx", "--no-build")
    text = refused(*words, *(["--dry-run"] if dry else ["-o", tmp_path / "out"]))
    assert "ranges for B, S; give --dims B=min:typical:max,S=min:typical:max" in text
