"""Compiling for several ranks and running them: the same numbers and text as on one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from irc.driver import load
from irc.errors import Error
from irc.ir.mesh import Mesh
from tests.cli.runner import npz_files, refused, run_arrays, works
from tests.layout import ROOT

LLAMA = ROOT / "examples" / "llama.py"
TINY = ROOT / "examples" / "tiny_llama"
PROMPT = ["--prompt", "The Python", "--max-new-tokens", "24"]
MESHES = (
    *("tp=2", "tp=3", "pp=2", "tp=2,pp=2", "dp=2,tp=2", "tp=2 --sequence", "tp=2 --embedding CA"),
    *("tp=3 --embedding auto --sequence", "tp=2 --outside clamp", "tp=3 --next-tokens"),
)
LOOKUP = """module @m mesh(tp=2) {
  weight @t : f32[9@tp, 4] = random("t", 0, 1)
  func @forward(%ids: i32[6]) -> (f32[6, 4]) {
    %a = embedding %ids, @t : f32[6, 4]{sum tp}
    %b = all_reduce %a {axis="tp"} : f32[6, 4]
    return %b
  }
}"""
CALL = """module @m {
  weight @t : f32[9, 4] = random("t", 0, 1)
  func @find(%ids: i32[6]) -> (f32[6, 4]) {
    %a = embedding %ids, @t : f32[6, 4]
    return %a
  }
  func @forward(%ids: i32[6]) -> (logits: f32[6, 4]) {
    %a = call %ids {callee=@find} : f32[6, 4]
    return %a
  }
}"""


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the tiny Llama on one rank."""
    folder = tmp_path_factory.mktemp("one") / "out"
    works("compile", LLAMA, "--checkpoint", TINY, "-o", folder)
    return works("generate", folder, *PROMPT).out


@pytest.mark.parametrize("mesh", MESHES)
def test_the_tiny_llama_writes_the_same_text(mesh: str, wanted: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    works("compile", LLAMA, "--checkpoint", TINY, "-o", folder, "--mesh", *mesh.split())
    assert works("generate", folder, *PROMPT).out == wanted
    ranks = len(list(folder.glob("rank*.onnx")))
    assert ranks == Mesh.parse(mesh.split()[0]).ranks


def test_run_has_global_inputs_and_outputs(
    checkpoint: Path, artifact: Path, tmp_path: Path
) -> None:
    ids = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    wanted = run_arrays(artifact, tmp_path, input_ids=ids)["logits"]
    works("compile", checkpoint, "-o", tmp_path / "out", "--mesh", "tp=2,dp=2")
    logits = run_arrays(tmp_path / "out", tmp_path, input_ids=ids)["logits"]
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


def test_explain_shows_decisions_and_reasons(checkpoint: Path) -> None:
    words = ["compile", checkpoint, "--dry-run", "--mesh", "cp=2,tp=2", "--explain"]
    out = works(*words).out
    assert "q_proj.weight" in out and "column-parallel" in out and "all_reduce" in out
    facts = works(*words, "--json").json
    notes = {each["pass"].partition("{")[0]: each["notes"] for each in facts["passes"]}
    assert notes["shard"] and facts["ranks"] == 4
    unused = "nothing is sharded over the mesh axis cp: its 2 ranks do the same"
    assert facts["notes"][0].startswith(unused)


FEED_FORWARDS = """
import irc
from irc.frontends import Module, ModuleList, functional as F
from irc.frontends.layers import Linear


class Block(Module):
    def __init__(self):
        self.fc, self.proj, self.q_proj = Linear(64, 256), Linear(256, 64), Linear(64, 64)

    def forward(self, x):
        return x + self.proj(F.relu(self.fc(self.q_proj(x))))


class Model(Module):
    def __init__(self):
        self.h = ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return {"y": x}


def build():
    return irc.trace(Model(), {"x": irc.Spec("f32", ("B", 64))}, {"B": (1, 8, 64)})
"""


def test_the_share_of_sharded_weights_is_said(checkpoint: Path, tmp_path: Path) -> None:
    """In bytes, by name, with the reason, and with a plan that shards more."""
    (tmp_path / "m.py").write_text(FEED_FORWARDS)
    words = ["compile", tmp_path / "m.py", "--random-weights", "0", "--mesh", "tp=2", "--dry-run"]
    lines = works(*words).out.splitlines()
    said = next(line for line in lines if "of the weights" in line)
    total = 2 * 4 * (64 * 64 + 2 * 64 * 256 + 384)
    assert said == (
        f"  {1 - 2 * 4 * 64 / total:.1%} of the weights ({total / 1000:.1f} kB) are sharded; "
        "replicated: the rest (512 B)"
    )
    assert said in works(*words, "--explain").out
    (tmp_path / "plan.txt").write_text("h.*.fc.weight 0@tp\n")
    less = works(*words, "--plan", tmp_path / "plan.txt").out
    query = 2 * 4 * 64 * 64
    assert f"{1 - (query + 4 * 4 * 64) / total:.1%} of the weights" in less  # the others follow
    assert f"replicated: h.*.q_proj.weight ({query / 1000:.1f} kB: no row of the plan names" in less
    assert "--plan FILE shards more, with rows such as h.*.q_proj.weight 0@tp, or the row" in less
    for mesh in ("dp=2", "cp=2"):
        assert "of the weights" not in works(*words[:-2], mesh, "--dry-run").out
    assert said in works(*words[:-2], "cp=2,tp=2", "--dry-run").out
    (tmp_path / "plan.txt").write_text("*.mlp.*.weight replicated\nmegatron\n")
    words = ["compile", checkpoint, "--dry-run", "--mesh", "tp=2", "--plan", tmp_path / "plan.txt"]
    assert f".mlp.up_proj.weight (12.3 kB: {tmp_path}/plan.txt:1)" in works(*words).out


def test_a_plan_of_the_user_is_followed(checkpoint: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    rows = ("# only the feed-forwards", "*.mlp.down_proj.weight 1@tp", "*_proj.weight replicated")
    plan.write_text("\n".join(rows))
    words = ["--dry-run", "--mesh", "tp=2", "--plan", plan, "--explain"]
    out = works("compile", checkpoint, *words).out
    assert f"{plan}:2" in out and "q_proj.weight is" not in out


def test_a_file_called_as_the_default_plan_is_no_plan(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("megatron").write_text("")
    works("compile", checkpoint, "-o", "out", "--mesh", "tp=2", "--quantize", "w8a16")
    assert "plan" not in json.loads(Path("out/config.json").read_text())["pipeline"]


def test_a_tp_plan_in_the_folder_is_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    words = ["compile", folder, "--dry-run", "--mesh", "tp=2", "--explain"]
    config["base_model_tp_plan"] = {"layers.*.mlp.down_proj": "rowwise"}
    (folder / "config.json").write_text(json.dumps(config))
    out = works(*words).out
    assert "config.json: rowwise" in out
    assert "q_proj.weight is" not in out
    works("compile", folder, "-o", tmp_path / "out", "--mesh", "tp=2")
    shutil.copytree(folder, tmp_path / "elsewhere" / "ck")
    other = tmp_path / "elsewhere" / "out"
    works("compile", tmp_path / "elsewhere" / "ck", "-o", other, "--mesh", "tp=2")
    manifests = [(out / "config.json").read_text() for out in (tmp_path / "out", other)]
    one, two = (json.loads(manifest)["pipeline"] for manifest in manifests)
    assert 'plan="../ck/config.json"' in one and one == two


@pytest.mark.parametrize(
    ("words", "wanted", "why"),
    [
        ("--outside clamp", "clamp: 1", ""),  # the cost model would replicate this table
        ("--outside clamp --embedding auto", "clamp: 1, replicated: 1", ""),
        ("--outside zero --embedding CA", "columns: 1", "is looked up by CA: it was requested"),
    ],
)
def test_embeddings_of_a_sharded_module(words: str, wanted: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(LOOKUP)
    command = ["compile", tmp_path / "m.irc", "--dry-run", "--explain", "--json", *words.split()]
    steps = [each for each in works(*command).json["passes"] if "rewrite-embed" in each["pass"]]
    assert [each["did"] for each in steps] == [wanted]
    assert why in " ".join(steps[0]["notes"])


@pytest.mark.parametrize("backend", ["onnx", "reference"])
def test_one_rank_counts_out_of_range_indices_in_a_call(backend: str, tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(CALL)
    words = ["compile", tmp_path / "m.irc", "-o", tmp_path / "out", "--backend", backend]
    made = works(*words, "--outside", "error", "--next-tokens", "--json").json
    passes = [each["pass"].partition("{")[0] for each in made["passes"]]
    assert passes[:3] == ["inline", "next-tokens", "rewrite-embeddings"]
    assert passes.count("inline") == 1
    run_arrays(tmp_path / "out", tmp_path, ids=np.array([0, 8, 3, 1, 2, 4]))
    files = npz_files(tmp_path, ids=np.array([0, 9, 3, -1, 2, 4]))
    said = refused("run", tmp_path / "out", *files)
    assert "indices from the input ids are out of range (2 of them)" in said


def test_rows_that_do_not_divide_are_named(checkpoint: Path, tmp_path: Path) -> None:
    files = npz_files(tmp_path, input_ids=np.array([[5, 6, 7]]))
    for mesh, what in (("dp=2", "1 rows"), ("tp=2 --sequence", "3 tokens")):
        works("compile", checkpoint, "-o", tmp_path / "a", "--mesh", *mesh.split())
        assert "must be a multiple of 2; pad it" in refused("run", tmp_path / "a", *files)
        with pytest.raises(Error, match=f"has {what}, .* expected a multiple of 2: pad them"):
            load(tmp_path / "a").run({"input_ids": [[5, 6, 7]]})
