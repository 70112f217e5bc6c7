"""`irc lint` on scripts of TensorRT-LLM: what every use is in irc, and the release."""

import ast
import json
from fractions import Fraction
from pathlib import Path

import pytest

from irc.cli.main import main
from irc.errors import Error
from irc.frontends.tensorrt_llm.lint import Use, as_rows, find_release, lint_script
from tests.layout import ROOT

SCRIPT = """\
import tensorrt_llm
import tensorrt_llm as tl
import a_package_that_is_not_installed as other
from tensorrt_llm import functional as F
from tensorrt_llm.functional import *
from tensorrt_llm.layers.lora import LoraRuntimeParams
from tensorrt_llm.models import GPTForCausalLM as GPT, LLaMAForCausalLM
from tensorrt_llm.nowhere import thing; from tensorrt_llm.bindings import KVCacheType

def build(x, group):
    network = tensorrt_llm.Builder().create_network()
    network.plugin_config.set_gemm_plugin("float16")
    x = F.allreduce(x, group, instance_id=3,
                    workspace=x, straategy=3)
    network.num_imputs
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
        root: ("supported", [1, 2, 11]),
        f"{root}.functional": ("supported", [4, 5, 13, 16]),
        f"{root}.layers.lora.LoraRuntimeParams": ("refused", [6]),
        f"{root}.models.GPTForCausalLM": ("refused", [7, 18]),
        f"{root}.models.LLaMAForCausalLM": ("supported", [7]),
        f"{root}.nowhere": ("unknown", [8]),
        f"{root}.bindings.KVCacheType": ("supported", [8]),
        f"{root}.Builder": ("supported", [11]),
        f"{root}.builder.Builder.create_network": ("supported", [11]),
        f"{root}.network.Network.plugin_config": ("supported", [12]),
        f"{root}.profiler": ("supported", [18]),
        f"{root}.plugin.plugin.PluginConfig.set_gemm_plugin": ("without effect", [12]),
        f"{root}.functional.allreduce": ("supported", [13]),
        "functional.allreduce(instance_id=)": ("without effect", [13]),
        "functional.allreduce(workspace=)": ("without effect", [14]),
        "functional.allreduce(straategy=)": ("unknown", [14]),
        f"{root}.network.Network.num_imputs": ("unknown", [15]),
        f"{root}.functional.softmax": ("supported", [16]),
        f"{root}.functional.mamba_conv1d": ("refused", [16]),
        f"{root}.functional.emmbedding": ("unknown", [16]),
        ".to_onnx": ("unchecked", [17]),
        f"{root}.layers.attention.PositionEmbeddingType.rope_gptj": ("supported", [18]),
        f"{root}.profiler.start": ("supported", [18]),
    }


# score | statuses | lines of a script
SCORES = """
1 | supported supported | from tensorrt_llm import BuildConfig; c = BuildConfig(); def f(c): c.any
1 | | import torch; x = torch.nn.Linear(3, 4, workspace=1); Builder()
2/3 | supported refused supported | from tensorrt_llm.functional import add, rg_lru; add(1, 2)
0 | refused unchecked | from tensorrt_llm.runtime.kv_cache_manager import KVCacheManager \
; x.to_onnx()
"""


@pytest.mark.parametrize("row", SCORES.strip().split("\n"))
def test_the_score_is_the_share_of_checked_uses_that_are_taken(row: str, tmp_path: Path) -> None:
    score, statuses, text = row.split("|")
    (tmp_path / "old.py").write_text(text.strip().replace("; ", "\n"))
    report = lint_script(tmp_path / "old.py")
    assert [use.status for use in report.uses] == statuses.split()
    assert report.score == float(Fraction(score.strip()))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.py"
    path.write_text("from tensorrt_llm.functional import rg_lru, add\nrg_lru(x)\n")
    assert main(["lint", str(path)]) == 1
    out = capsys.readouterr().out
    name = "tensorrt_llm.functional.rg_lru"
    assert f"{path}:1,2: {name}: refused: write the recurrence as an operation" in out
    assert (
        f"{path}: 3 uses of TensorRT-LLM 0.16.0, 33% taken" in out and "functional.add" not in out
    )
    assert main(["lint", str(path), "--all"]) == 1
    assert f"{path}:1: tensorrt_llm.functional.add: supported\n" in capsys.readouterr().out
    assert main(["lint", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and Use(**report["uses"][0]) == lint_script(path).uses[0]
    path.write_text("from tensorrt_llm.functional import add\n")
    assert main(["lint", str(path)]) == 0
    path.write_text("import tensorrt_llm\nprint 'x'\n")
    with pytest.raises(Error, match=r"old\.py:2:1: error: not Python"):
        lint_script(path)


EXAMPLES = sorted((ROOT / "examples" / "tensorrt_llm").glob("*/*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_irc_takes_all_of_the_examples(script: Path) -> None:
    report = lint_script(script)
    assert report.score == 1, as_rows(report)[0]
    assert len(report.uses) > 5


# the first and the last release that a script may be of | the script
TEXTS = """
5 7 | from tensorrt_llm.functional import allreduce; allreduce(x, g, workspace=w)
9 15 | from tensorrt_llm.functional import allreduce; allreduce(x, g, config=c)
5 10 | network.plugin_config.set_gpt_attention_plugin(dtype='float16')
5 7 | import tensorrt_llm.models as m; m.GPTLMHeadModel(num_layers=1, a=2, b=3)
11 16 | from tensorrt_llm import BuildConfig; BuildConfig(max_seq_len=3)
9 16 | from tensorrt_llm.layers import Attention; Attention(local_layer_idx=3)
8 16 | from tensorrt_llm.models import LLaMAForCausalLM as L; L.from_hugging_face('f')
16 16 | x = 1
"""


@pytest.mark.parametrize("row", TEXTS.strip().split("\n"))
def test_the_release(row: str, tmp_path: Path) -> None:
    range_, text = row.split(" | ")
    least, most = map(int, range_.split())
    assert least <= find_release(ast.parse(text)) <= most
    path = tmp_path / "script.py"
    path.write_text(text)
    (tmp_path / "requirements.txt").write_text("torch\ntensorrt_llm==0.9.0\n")
    assert find_release(ast.parse(text), path) == 9
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / "setup.py").write_text("setup(name='tensorrt_llm',\n      version='0.5.0')\n")
    assert find_release(ast.parse(text), path) == 5


def test_the_release_of_the_modules_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "weight.py").write_text("from tensorrt_llm import BuildConfig\nBuildConfig()\n")
    text = "import tensorrt_llm, weight"
    assert find_release(ast.parse(text), tmp_path / "build.py") == 16
    (tmp_path / "weight.py").write_text(
        "import tensorrt_llm.models as m\nm.GPTLMHeadModel(a=1, b=2, c=3)"
    )
    assert find_release(ast.parse(text), tmp_path / "build.py") <= 7
