"""`irc plugins`, and `--plugin` of the commands that look at files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from irc.backends.tensorrt.commands import page
from irc.backends.tensorrt.plugins import find
from tests.cli.runner import refused, works
from tests.tensorrt.graphs import model, node
from tests.user_code import EXAMPLE, restored_registries


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture
def capped(tmp_path: Path) -> Path:
    named = {"plugin_version": "1", "plugin_namespace": "example", "cap": "2.0"}
    path = tmp_path / "capped.onnx"
    path.write_bytes(model(node("SoftCap", "x", **named), "x:f16[4,8]").SerializeToString())
    return path


def test_plugins_are_listed_with_a_line_each() -> None:
    head, *rows = works("plugins", "--plugin", EXAMPLE).out.splitlines()
    assert head.split()[:2] == ["plugin", "version"]
    assert [row.split()[0] for row in rows] == ["example::SoftCap", "IrcCollective"]
    assert "y = cap * tanh(x / cap)" in rows[0]


@pytest.mark.parametrize("name", ["SoftCap", "example::SoftCap"])
def test_the_page_of_a_plugin(name: str) -> None:
    out = works("plugins", name, "--plugin", EXAMPLE).out
    assert out == page(find("SoftCap", namespace="example"))
    assert "version 1, namespace `example`" in out
    assert "| `cap` | float | required | the bound, more than 0 |" in out
    assert "| `T` | f32 f16 bf16 |" in out and "| output | `y` | T | as x |" in out
    assert "imported as the operation `soft_cap`" in out


def test_the_page_of_irc_s_own_needs_no_file() -> None:
    out = works("plugins", "IrcCollective").out
    assert out.startswith("# IrcCollective\n")
    assert "| `root` | int | `-1` |" in out and "all_reduce_rms_norm" in out


def test_json() -> None:
    (found,) = works("plugins", "SoftCap", "--load", EXAMPLE, "--json").json
    assert (found["namespace"], found["version"], found["operation"]) == (
        "example",
        "1",
        "soft_cap",
    )
    assert [field["name"] for field in found["fields"]] == ["cap"]


def test_names_that_are_none() -> None:
    said = refused("plugins", "IrcColective")
    assert "did you mean 'IrcCollective'? Otherwise name the file" in said and "--plugin" in said
    assert "no plugin called 'zzz'; name the file that registers it" in refused("plugins", "zzz")
    assert "registers no plugin" in refused(
        "plugins", "--plugin", EXAMPLE.with_name("two_tower.py")
    )


def test_nodes_of_plugins_are_shown_as_operations(capped: Path) -> None:
    assert "name the file that registers that with --load" in refused("show", capped)
    assert "soft_cap %x {cap=2.0}" in works("show", capped, "--load", EXAMPLE).out


def test_text_with_operations_of_a_plugin_needs_its_file(capped: Path) -> None:
    text = capped.with_suffix(".irc")
    with restored_registries():
        text.write_text(works("show", capped, "--load", EXAMPLE).out)
    said = refused("show", text)
    assert "the file that declares it with --load" in said
    assert "soft_cap %x" in works("show", text, "--load", EXAMPLE).out
