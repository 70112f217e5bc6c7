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


@pytest.mark.parametrize(
    ("expression", "line", "marked", "op"),
    [
        ('{"z": (größe + y) * 2}', 'return {"z": (größe + y) * 2}', "größe + y", "%größe, %y"),
        ("(größe +\n                y)", "return (größe +", "größe +", "%größe, %y"),
    ],
    ids=["one line", "several lines"],
)
def test_the_expression_is_marked(
    expression: str, line: str, marked: str, op: str, tmp_path: Path
) -> None:
    """On its first line."""
    path = tmp_path / "model.py"
    path.write_text(SCRIPT.format(expression=expression), encoding="utf-8")
    with pytest.raises(Error) as caught:
        load_script(str(path))
    where, shown, mark, operation = str(caught.value).splitlines()
    says = "add: the shapes [2, 3] and [2, 4] do not broadcast"
    assert where.startswith(f"{tmp_path}/model.py:5: {says}")
    assert shown == f"    {line}" and operation.strip() == f"add {op}"
    assert shown[mark.index("^") : mark.rindex("^") + 1] == marked


def test_a_location_without_a_trace_has_no_line() -> None:
    assert Loc("model.py", 3, "layers.0").excerpt() == ""
    assert str(Error("no", loc=Loc("model.py", 3, "layers.0"))) == "model.py:3 in layers.0: no"
