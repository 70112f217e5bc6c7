"""Locations: the user's line, the module path, and the mark under the expression."""

from pathlib import Path

import pytest

from irc.errors import Error
from irc.frontends.script import load_script
from irc.source import Loc

SCRIPT = """import irc

def build():
    def forward(größe, y):
        return {expression}
    specs = {{"größe": irc.Spec("f32", (2, 3)), "y": irc.Spec("f32", (2, 4))}}
    return irc.trace(lambda **given: forward(*given.values()), specs)
"""


def message(folder: Path, expression: str) -> list[str]:
    path = folder / "model.py"
    path.write_text(SCRIPT.format(expression=expression), encoding="utf-8")
    with pytest.raises(Error) as caught:
        load_script(str(path))
    return str(caught.value).splitlines()


def test_the_expression_is_marked(tmp_path: Path) -> None:
    where, line, mark, op = message(tmp_path, '{"z": (größe + y) * 2}'.replace("größe", "größe"))
    assert where.startswith(
        f"{tmp_path}/model.py:5: add: the shapes [2, 3] and [2, 4] do not broadcast"
    )
    assert line == '    return {"z": (größe + y) * 2}'
    assert line[mark.index("^") : mark.rindex("^") + 1] == "größe + y"
    assert op.strip() == "add %größe, %y"


def test_an_expression_over_several_lines_is_marked_on_its_first(tmp_path: Path) -> None:
    _, line, mark, op = message(tmp_path, "(größe +\n                y)")
    assert line == "    return (größe +"
    assert line[mark.index("^") : mark.rindex("^") + 1] == "größe +"
    assert op.strip().startswith("add ")


def test_a_location_without_a_trace_has_no_line() -> None:
    assert Loc("model.py", 3, "layers.0").excerpt() == ""
    assert str(Error("no", loc=Loc("model.py", 3, "layers.0"))) == "model.py:3 in layers.0: no"
