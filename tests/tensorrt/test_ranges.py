"""The ranges of symbols, which engines need."""

from __future__ import annotations

import pytest

from irc.backends.tensorrt.ranges import profiles_of
from irc.errors import Error
from irc.text import parse_module

MODULE = """module @m {{
  func @forward(%x: f32[{0}], %y: f32[{1}]) -> (a: f32[{0}], b: f32[{1}]) {{
    %a = relu %x : f32[{0}]
    %b = relu %y : f32[{1}]
    return %a, %b
  }}
}}
"""


def test_all_symbols_without_a_range_are_named() -> None:
    functions = [parse_module(MODULE.format(*each)).main for each in (("B, 4", "S"), ("B", "2*T"))]
    with pytest.raises(Error) as caught:
        profiles_of(functions, {"S": (1, 2, 4)})
    wanted = "B=min:typical:max,T=min:typical:max"
    assert str(caught.value) == f"an engine needs ranges for B, T; give --dims {wanted}"
    with pytest.raises(Error, match=r"needs a range for T; give --dims T=min:typical:max$"):
        profiles_of(functions, {"S": (1, 2, 4), "B": (1, 1, 1)})
    found = profiles_of(functions, dict.fromkeys("BST", (1, 2, 4)))
    assert found[1][0].shapes == {"x": ((1,), (2,), (4,)), "y": ((2,), (4,), (8,))}
