"""A module and a script."""

from pathlib import Path

import pytest

MODULE = """\
module @m dims(B=1:2:4) {
  weight @w : f32[8, 4] = random("w", 1, 0.5)
  func @forward(%x: f32[B, 4]) -> (y: f32[B, 8]) {
    %two = mul %x, %x : f32[B, 4] loc("model.py":7 "layers.0.norm")
    %again = mul %x, %x : f32[B, 4] loc("model.py":8 "layers.0.mlp")
    %sum = add %two, %again : f32[B, 4] loc("model.py":9 "layers.0.mlp")
    %y = linear %sum, @w : f32[B, 8] loc("model.py":12 "head")
    return %y
  }
}
"""
SCRIPT = """
import irc
from irc.frontends import Module
from irc.frontends.layers import Linear

class Tiny(Module):
    def __init__(self, width, dtype):
        self.head = Linear(4, width, dtype=dtype)

    def forward(self, x):
        return {"y": self.head(x) + self.head(x)}

def build(width: int = 8, dtype: str = "f32", checkpoint: str | None = None):
    return irc.trace(Tiny(width, dtype), {"x": irc.Spec(dtype, ("B", 4))}, {"B": (1, 2, 4)})

def other():
    return build(3)

def broken(width: int = 8):
    raise ValueError("no such luck")

def misshapen():
    def forward(x, y):
        return x + y
    return irc.trace(forward, {"x": irc.Spec("f32", (2, 3)), "y": irc.Spec("f32", (2, 4))})
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A file with MODULE."""
    path = tmp_path / "m.irc"
    path.write_text(MODULE)
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A file with SCRIPT."""
    path = tmp_path / "tiny.py"
    path.write_text(SCRIPT)
    return path
