"""`--tensorrt-llm-sources`: modules that irc lacks, from a copy of sources (here: of our own)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from irc.cli.main import main
from irc.errors import Error
from irc.frontends.tensorrt_llm.lint import lint_script
from irc.frontends.tensorrt_llm.script import run_script
from irc.frontends.tensorrt_llm.sources import package_folder

FILES = {
    "version.py": '__version__ = "0.7.1"\n',
    "functional.py": "def a_plugin_of_its_own(x):\n    return x\n",
    "layers/__init__.py": "raise RuntimeError('the package is never imported')\n",
    "layers/normalization.py": (
        "import a_package_that_nobody_has\n"
        "from ..functional import add\n"
        "SLOPE = 2\n"
        "def _twice(x):\n    return add(x, x)\n"
        "class LayerNorm:\n    own = False\n"
        "class Doubled:\n    base = LayerNorm\n    slope = SLOPE\n"
        "    def __call__(self, x):\n        return _twice(x)\n"
        "def needs_it(x):\n    return a_package_that_nobody_has.f(x)\n"
    ),
    "models/__init__.py": "from .tiny.model import TinyModel\nMODELS = {'tiny': TinyModel}\n",
    "models/tiny/__init__.py": "",
    "models/tiny/model.py": (
        "from ...functional import a_plugin_of_its_own, relu\n"
        "from ...layers.normalization import Doubled, LayerNorm, needs_it\n"
        "from ...module import Module\n"
        "from .config import BIAS\n"
        "class TinyModel(Module):\n"
        "    def forward(self, x, way=''):\n"
        "        if way == 'plugin':\n"
        "            return a_plugin_of_its_own(x)\n"
        "        if way == 'package':\n"
        "            return needs_it(x)\n"
        "        if way == 'mistake':\n"
        "            return x.no_such_attribute\n"
        "        return relu(Doubled()(x) + BIAS)\n"
    ),
    "models/tiny/config.py": "BIAS = 1.0\n",
}
SCRIPT = """
import sys
import tensorrt_llm
from tensorrt_llm.models import MODELS, TinyModel
from tensorrt_llm.models.tiny.model import Doubled, LayerNorm
from tensorrt_llm.models.tiny.model import TinyModel as same

assert same is TinyModel is MODELS["tiny"] and tensorrt_llm.__version__ == "0.7.1"
assert Doubled.base is LayerNorm is tensorrt_llm.layers.LayerNorm and Doubled.slope == 2
builder = tensorrt_llm.Builder()
network = builder.create_network()
with tensorrt_llm.net_guard(network):
    x = tensorrt_llm.Tensor(name="x", dtype=tensorrt_llm.str_dtype_to_trt("float32"), shape=[3])
    TinyModel()(x, *sys.argv[1:]).mark_output("y")
builder.build_engine(network, builder.create_builder_config("float32", name="tiny"))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "copy" / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "build.py").write_text(SCRIPT)
    return tmp_path / "copy"


def test_models_and_missing_names_come_from_the_sources(sources: Path) -> None:
    run = run_script(sources.parent / "build.py", sources=sources)
    (module,) = run.engines.values()
    text = str(module)
    assert "relu" in text and "add" in text and run.session.release < 8
    assert "tensorrt_llm.models" not in sys.modules


@pytest.mark.parametrize(
    ("way", "place", "says"),
    [
        ("plugin", "model.py:8", "a_plugin_of_its_own is not supported: it works on TensorRT"),
        ("package", "normalization.py:14", "normalization.py:1 cannot import it: No module named"),
        ("mistake", "model.py:12", "no attribute 'no_such_attribute'"),
    ],
)
def test_errors_name_the_line_of_the_sources(
    sources: Path, way: str, place: str, says: str
) -> None:
    with pytest.raises(Error, match=f"(?s){place}.*{says}"):
        run_script(sources.parent / "build.py", [way], sources=sources)


def test_without_sources_the_error_names_the_option(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = sources.parent / "other.py"
    script.write_text("from tensorrt_llm.models import GPTLMHeadModel\nGPTLMHeadModel(1)\n")
    with pytest.raises(Error, match=r"GPTLMHeadModel is not supported.*--tensorrt-llm-sources DIR"):
        run_script(script)
    with pytest.raises(Error, match=r"GPTLMHeadModel is not supported: .*does not define it eith"):
        run_script(script, sources=sources)
    main(["lint", str(script)])
    assert "--tensorrt-llm-sources DIR" in capsys.readouterr().out


def test_lint_says_what_comes_from_the_sources(sources: Path) -> None:
    script = sources.parent / "other.py"
    script.write_text(
        "from tensorrt_llm.models import MODELS, TinyModel, GPTLMHeadModel\n"
        "from tensorrt_llm.models.tiny.model import TinyModel as same\n"
        "from tensorrt_llm.functional import a_plugin_of_its_own\n"
    )
    expected = ["supported", "supported", "refused", "supported", "unknown"]
    assert [use.status for use in lint_script(script, sources=sources).uses] == expected
    assert lint_script(script).score == 0


def test_a_folder_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"expected the sources of TensorRT-LLM in .*functional\.py"):
        package_folder(tmp_path)
