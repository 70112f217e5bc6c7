"""`irc lint` on scripts of TensorRT-LLM: the status of every name, and the dialect."""

import ast
import json
from pathlib import Path

import pytest

from irc.cli.main import main
from irc.errors import Error
from irc.frontends.tensorrt_llm.dialects import find_dialect
from irc.frontends.tensorrt_llm.lint import Use, as_rows, lint_script
from tests.layout import ROOT

SCRIPT = """\
import tensorrt_llm
import tensorrt_llm as tl
import a_package_that_is_not_installed as other
from tensorrt_llm import functional as F
from tensorrt_llm.functional import *
from tensorrt_llm.layers.lora import LoraParams
from tensorrt_llm.models import GPTForCausalLM as GPT, LLaMAForCausalLM
from tensorrt_llm.nowhere import thing; from tensorrt_llm.bindings import KVCacheType

def build(x, group):
    network = tensorrt_llm.Builder().create_network()
    network.plugin_config.set_gemm_plugin("float16")
    x = F.allreduce(x, group, instance_id=3,
                    workspace=x)
    x = softmax(x, -1) + F.mamba_conv1d(x) + F.emmbedding(x, x)
    other.Builder(workspace=3).to_onnx()
    return tl.layers.attention.PositionEmbeddingType.rope_gptj, GPT, tl.profiler.start("x")
"""


def statuses(text: str, folder: Path) -> dict[str, tuple[str, list[int]]]:
    path = folder / "old.py"
    path.write_text(text)
    return {use.name: (use.status, lines) for use, lines in as_rows(lint_script(path))}


def test_the_status_of_every_name(tmp_path: Path) -> None:
    root = "tensorrt_llm"
    assert statuses(SCRIPT, tmp_path) == {
        root: ("supported", [1, 2]),
        f"{root}.functional": ("supported", [4, 5]),
        f"{root}.layers.lora.LoraParams": ("unsupported", [6]),
        f"{root}.models.GPTForCausalLM": ("unsupported", [7, 17]),
        f"{root}.models.LLaMAForCausalLM": ("supported", [7]),
        f"{root}.nowhere": ("unknown", [8]),
        f"{root}.bindings.KVCacheType": ("supported", [8]),
        f"{root}.Builder": ("supported", [11]),
        ".create_network": ("supported", [11]),
        ".set_gemm_plugin": ("without effect", [12]),
        f"{root}.functional.allreduce": ("supported", [13]),
        "instance_id=": ("without effect", [13]),
        "workspace=": ("without effect", [14]),
        f"{root}.functional.softmax": ("supported", [15]),
        f"{root}.functional.mamba_conv1d": ("unsupported", [15]),
        f"{root}.functional.emmbedding": ("unknown", [15]),
        ".to_onnx": ("unsupported", [16]),
        f"{root}.layers.attention.PositionEmbeddingType": ("supported", [17]),
        f"{root}.profiler.start": ("supported", [17]),
    }


def test_names_of_other_packages_are_no_uses(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text("import torch\nx = torch.nn.Linear(3, 4, workspace=1)\nBuilder()\n")
    assert lint_script(path).uses == []
    assert lint_script(path).score == 1


def test_the_score_is_the_share_of_uses_that_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text("from tensorrt_llm.functional import add, rg_lru\nadd(1, 2, strategy=3)\n")
    report = lint_script(path)
    assert [use.status for use in report.uses] == [
        "supported",
        "unsupported",
        "supported",
        "without effect",
    ]
    assert report.score == 3 / 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.py"
    path.write_text("from tensorrt_llm.functional import rg_lru, add\nrg_lru(x)\n")
    assert main(["lint", str(path)]) == 1
    out = capsys.readouterr().out
    name = "tensorrt_llm.functional.rg_lru"
    assert f"{path}:1,2: {name}: unsupported: write the recurrence as an operation" in out
    assert f"{path}: 3 uses of TensorRT-LLM, 33% taken" in out
    assert "functional.add" not in out
    assert main(["lint", str(path), "--all"]) == 1
    assert f"{path}:1: tensorrt_llm.functional.add: supported\n" in capsys.readouterr().out
    assert main(["lint", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert Use(**found["uses"][0]) == lint_script(path).uses[0]
    path.write_text("from tensorrt_llm.functional import add\n")
    assert main(["lint", str(path)]) == 0


EXAMPLES = sorted((ROOT / "examples" / "tensorrt_llm").glob("*/*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_irc_takes_all_of_the_examples(script: Path) -> None:
    report = lint_script(script)
    assert report.score == 1, as_rows(report)[0]
    assert len(report.uses) > 5
    assert find_dialect(ast.parse(script.read_text())) == script.parent.name[-1].upper()


def test_a_script_of_python_2(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text("import tensorrt_llm\nprint 'x'\n")
    with pytest.raises(Error, match=r"old\.py:2:1: error: not Python"):
        lint_script(path)


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("allreduce(x, group, workspace=w, instance_id=3)", "A"),
        ("from tensorrt_llm.models import LLaMAForCausalLM, quantize_model", "A"),
        ("network.plugin_config.set_gpt_attention_plugin(dtype='float16')", "A"),
        ("from tensorrt_llm import BuildConfig, build", "B"),
        ("Attention(local_layer_idx=3, hidden_size=4)", "B"),
        ("model = LLaMAForCausalLM.from_hugging_face('folder')", "B"),
        ("x = 1", "B"),
        ("f(workspace=w)\nf(workspace=v)\nQuantConfig(QuantAlgo.FP8)", "B"),
    ],
)
def test_the_dialect(text: str, dialect: str) -> None:
    assert find_dialect(ast.parse(text)) == dialect
