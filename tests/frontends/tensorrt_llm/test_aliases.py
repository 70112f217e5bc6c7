"""The modules that scripts import as tensorrt_llm and tensorrt, and the table of their names."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from irc.errors import Error
from irc.frontends.script import load_script
from irc.frontends.tensorrt_llm.aliases import aliases, originals
from irc.frontends.tensorrt_llm.context import new_session

INSTALLED = ("tensorrt_llm", "tensorrt_llm.functional", "tensorrt")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules in the place of a real installation that the process has imported."""
    modules = {name: ModuleType(name) for name in INSTALLED}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def run(text: str) -> dict[str, object]:
    """The names of a script that runs with the aliases."""
    names: dict[str, object] = {}
    exec(compile(text, "old.py", "exec"), names)
    return names


def test_an_installation_is_put_aside_and_put_back(installed: dict[str, ModuleType]) -> None:
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError, match="in the block"), aliases():
        names = run("import tensorrt, tensorrt_llm, tensorrt_llm.layers.attention as attention")
        assert not {id(names["tensorrt_llm"]), id(names["tensorrt"])} & {
            *map(id, installed.values())
        }
        with originals():
            assert run("import tensorrt_llm")["tensorrt_llm"] is installed["tensorrt_llm"]
        assert run("import tensorrt_llm")["tensorrt_llm"] is names["tensorrt_llm"]
        raise RuntimeError("in the block")
    left = {name: module for name, module in sys.modules.items() if name.startswith("tensorrt")}
    assert left.items() >= installed.items() and sys.meta_path == finders
    assert "tensorrt_llm.layers.attention" not in left


NAMES = """
import tensorrt as trt
import tensorrt_llm, tensorrt_llm.network
from tensorrt_llm._utils import str_dtype_to_trt, to_json_file
from tensorrt_llm.parameter import Parameter
from tensorrt_llm.logger import logger
from tensorrt_llm.bindings import KVCacheType

assert tensorrt_llm.builder.KVCacheType.PAGED is KVCacheType.PAGED
assert trt.init_libnvinfer_plugins(trt.Logger(), "") and trt.__version__.startswith("10.")
assert trt.Logger(trt.Logger.ERROR).min_severity == trt.Logger.Severity.ERROR
assert str_dtype_to_trt("float16") == trt.float16 == trt.DataType.HALF
assert tensorrt_llm.Module is tensorrt_llm.module.Module
assert tensorrt_llm.Mapping is tensorrt_llm.mapping.Mapping
to_json_file({"b": 1, "a": [2]}, path)
logger.set_level("error"); logger.warning("x")
logger.set_level("warning")
for _ in range(2): logger.warning_once("y", key=path)
tensorrt_llm.profiler.start("x"); tensorrt_llm.logger.set_level("info")
assert logger.level == "info"
logger.set_level("warning")
"""


@pytest.mark.parametrize(("version", "shown"), [("0.7", "0.7.1"), ("0.16", "0.16.0")])
def test_names_that_scripts_use(
    version: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_session(version), aliases():
        names = run(
            f"path = {str(tmp_path / 'a.json')!r}\n{NAMES}version = tensorrt_llm.__version__"
        )
    assert names["version"] == shown
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [2], "b": 1}
    assert capsys.readouterr().err.splitlines() == ["[warning] y"]


UNSUPPORTED = (
    "from tensorrt_llm.layers import Lora\nfrom tensorrt_llm.layers.lora import LoraParams\n"
)


def test_unsupported_names_may_be_imported() -> None:
    with aliases():
        names = run(
            f"{UNSUPPORTED}from typing import Optional\n"
            "def f(x: LoraParams | None = None, y: Optional[Lora] = None): pass\n"
            "found = isinstance(f, Lora)\n"
        )
    assert names["found"] is False


@pytest.mark.parametrize(
    "use", ["Lora(3)", "Lora.from_config", "class Mine(Lora): pass", "[*Lora]"]
)
def test_an_unsupported_name_says_the_alternative_at_the_line_that_uses_it(
    use: str, tmp_path: Path
) -> None:
    script = tmp_path / "model.py"
    script.write_text(f"{UNSUPPORTED}def build():\n    {use}\n")
    with pytest.raises(Error, match=r"layers\.Lora is not supported: merge the adapters") as caught:
        load_script(f"{script}:build")
    assert f"model.py:4: {caught.value.message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import tensorrt_llm.functionl", "no module tensorrt_llm.functionl; did you mean 'func"),
        ("import tensorrt_llm\ntensorrt_llm.functional.emmbedding", "did you mean 'embedding'"),
        ("import tensorrt\ntensorrt.Builder()", "tensorrt.Builder is not supported: irc builds"),
    ],
)
def test_unknown_names(text: str, message: str) -> None:
    with pytest.raises(Exception, match=message), aliases():
        run(text)
