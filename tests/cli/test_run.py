"""`irc run`, `irc generate` and `irc quality`: arrays in and out, text in and out, figures."""

import os
import pty
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.onnxruntime import OnnxRuntimeStream
from irc.cli.arrays import Difference, differences
from irc.driver import load
from irc.generation.random_inputs import random_inputs
from irc.text import parse_module
from tests.cli.runner import PROGRAM, entries, irc, npz_files, refused, run_arrays, works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.tiny_checkpoint import write_checkpoint

PLAIN = """\
module @m {
  func @forward(%x: bf16[B]) -> (file: bf16[B], allow_pickle: i32[B]) {
    %y = add %x, %x : bf16[B]
    %n = cast %y {dtype="i32"} : i32[B]
    return %y, %n
  }
}
"""


IDS = np.array([[1, 2, 3], [4, 5, 6]])
LOCAL = """\
module @m local mesh(tp=3) {
  func @forward(%x: f32[B]) -> (y: f32[B]) {
    %rank = rank {axis="tp"} : i32[]{varies tp}
    %factor = cast %rank {dtype="f32"} : f32[]{varies tp}
    %part = mul %x, %factor : f32[B]{varies tp}
    %y = all_reduce %part {axis="tp", group_size=3} : f32[B]
    return %y
  }
}
"""

# ------------------------------------------------------------------ run


def test_a_local_module_runs_on_all_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(LOCAL)
    works("compile", tmp_path / "m.irc", "-o", tmp_path / "out")
    x = np.array([1, 2], np.float32)
    for source, words in (("m.irc", ["--backend", "reference"]), ("out", [])):
        found = run_arrays(tmp_path / source, tmp_path, *words, x=x)
        np.testing.assert_array_equal(found["y"], [3, 6])


def test_ids_alone_are_enough(artifact: Path, tmp_path: Path) -> None:
    answer = works("run", artifact, *npz_files(tmp_path, input_ids=IDS))
    assert answer.out == "logits  float32[2, 3, 300]\n"
    found = np.load(tmp_path / "out.npz")
    assert found.files == ["logits"]
    same = run_arrays(artifact, tmp_path, "--backend", "reference", input_ids=IDS)["logits"]
    np.testing.assert_allclose(found["logits"], same, rtol=1e-4, atol=1e-4)
    alone = load(artifact).run({"input_ids": IDS[:1]})["logits"]
    np.testing.assert_allclose(found["logits"][:1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("token", [300, -1])
def test_tokens_outside_the_vocabulary_are_noted(
    token: int, artifact: Path, tmp_path: Path
) -> None:
    answer = works("run", artifact, *npz_files(tmp_path, input_ids=[[1, token]]))
    assert f"note: input_ids has the token {token}, but the model has 300 tokens" in answer.err


def test_sizes_outside_the_compiled_range_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    works("compile", checkpoint, "-o", out, "--dims", "B=2:2:8,S=1:1:2")
    for rows, tokens, size in ((9, 2, "B=9"), (1, 2, "B=1"), (2, 3, "S=3")):
        words = npz_files(tmp_path, input_ids=np.ones((rows, tokens), int))
        for backend in ("onnx", "reference"):
            told = refused("run", out, *words, "--backend", backend)
            assert f"error: input_ids has {size}, but the model was compiled for " in told
    says = "input_ids has B=1, but the model was compiled for B=2 to 8"
    assert says in irc("generate", out, "--prompt", "the").err


def test_caches_are_returned_if_they_are_inputs(artifact: Path, tmp_path: Path) -> None:
    arrays = {name: np.zeros((1, 2, 16, 8)) for name in ("k0", "v0", "k1", "v1")}
    outputs = run_arrays(artifact, tmp_path, "--json", input_ids=IDS[:1], **arrays)
    assert list(outputs) == ["logits", *arrays]
    assert outputs["k0"][:, :, :3].any() and not outputs["k0"][:, :, 3:].any()


def test_a_module_runs_on_the_reference(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(PLAIN)
    x = np.array([1, 2.5])
    outputs = run_arrays(tmp_path / "m.irc", tmp_path, "--backend", "reference", x=x)
    assert list(outputs) == ["file", "allow_pickle"], "any name is one of a result"
    for array, dtype in zip(outputs.values(), (np.float32, np.int32), strict=True):
        assert (array.dtype, array.tolist()) == (dtype, [2, 5])


def test_outputs_that_cannot_be_written(artifact: Path, tmp_path: Path) -> None:
    words = ["run", artifact, *npz_files(tmp_path, input_ids=IDS)[:3]]
    assert "No such file or directory" in refused(*words, tmp_path / "none" / "out.npz")
    (tmp_path / "folder").mkdir()
    assert "cannot write" in refused(*words, tmp_path / "folder")
    assert entries(tmp_path) == ["folder", "in.npz"]


# ------------------------------------------------------------------ random inputs, comparisons


def test_random_inputs_have_typical_sizes(artifact: Path, module: Path, tmp_path: Path) -> None:
    words = ["run", module, "--backend", "reference", "--random", "5", "--outputs"]
    first, second = (works(*words, tmp_path / f"{i}.npz").out for i in range(2))
    assert first == second == "y  float32[2, 8]\n"
    one, two = (np.load(tmp_path / f"{i}.npz")["y"] for i in range(2))
    np.testing.assert_array_equal(one, two)
    works(*words[:-2], "6", "--outputs", tmp_path / "2.npz")
    assert (np.load(tmp_path / "2.npz")["y"] != one).all()
    assert works("run", artifact, "--random", "1").out == "logits  float32[1, 1, 300]\n"


LOOKUP = """\
module @m dims(B=1:50:60) {
  weight @t : f32[5, 2] = random("t", 1, 0.5)
  func @forward(%ids: i64[B], %n: i32[B], %on: bool[]) -> (y: f32[B, 2], n: i32[B], on: bool[]) {
    %y = embedding %ids, @t : f32[B, 2]
    return %y, %n, %on
  }
}
"""


def test_random_ids_are_rows_of_their_table() -> None:
    found = random_inputs(parse_module(LOOKUP), int(fresh().integers(1 << 30)))
    assert {name: (a.dtype.name, a.shape) for name, a in found.items()} == {
        "ids": ("int64", (50,)),
        "n": ("int32", (50,)),
        "on": ("bool", ()),
    }
    assert set(found["ids"]) <= set(range(5)) and found["ids"].max() > 1
    assert set(found["n"]) <= {0, 1}


def test_results_are_compared(artifact: Path, two_ranks: Path, tmp_path: Path) -> None:
    seed = str(int(fresh().integers(1 << 30)))
    words = ["run", artifact, "--random", seed, "--outputs", tmp_path / "out.npz", "--compare"]
    for other in (two_ranks, artifact / "module.irc"):
        assert re.search(r"^logits +0 of 300 +.* ok$", works(*words, other).out, re.MULTILINE)
    logits = np.load(tmp_path / "out.npz")["logits"]
    wrong = logits.copy()
    wrong[0, 0, 7] += 1
    np.savez(tmp_path / "b.npz", logits=wrong)
    answer = irc("run", artifact, "--random", seed, "--compare", tmp_path / "b.npz", "--json")
    (found,) = answer.json["differences"]
    assert (answer.status, found["wrong"], found["size"]) == (1, 1, 300)
    assert found["largest"] == pytest.approx(1, rel=1e-3)
    loose = ("--compare", tmp_path / "b.npz", "--rtol", "0", "--atol", "1.1")
    works("run", artifact, "--random", seed, *loose)
    np.savez(tmp_path / "b.npz", logits=wrong[0], more=wrong)
    answer = irc("run", artifact, "--random", seed, "--compare", tmp_path / "b.npz")
    assert answer.status == 1
    assert re.search(r"logits +the shapes \[1, 1, 300\] and \[1, 300\] differ", answer.out)
    assert re.search(r"more +only in the second", answer.out)


def difference(a: Any, b: Any, rtol: float = 0.0, atol: float = 0.0) -> Difference:
    (found,) = differences({"y": np.array(a)}, {"y": np.array(b)}, rtol, atol)
    return found


def test_differences() -> None:
    nan, inf = float("nan"), float("inf")
    assert difference([nan, inf, -inf, 1], [nan, inf, -inf, 1.0]).ok
    assert difference([nan, inf, 1.0], [1.0, -inf, nan], 9, 9).wrong == 3
    assert difference([1.0, 100.0], [1.5, 110.0], atol=0.6).wrong == 1
    assert difference([1.0, 100.0], [1.5, 110.0], rtol=0.1).wrong == 1
    assert difference([1, 2], [1, 3], 9, 9).wrong == 1
    assert difference([True, False], [True, False]).ok
    assert difference([], []).ok
    assert not difference(["a"], ["a"]).ok


# ------------------------------------------------------------------ generate


def test_text_follows_the_prompt(artifact: Path) -> None:
    answer = works("generate", artifact, "--prompt", "the other", "--max-new-tokens", "12")
    text = load(artifact).generate("the other", 12)
    assert answer.out == f"the other{text}\n"
    rate = r"[\d.]+ tokens/s"
    expected = rf"5 tokens of prompt at {rate}, 12 new at {rate} \(--max-new-tokens\)\n"
    assert re.fullmatch(expected, answer.err)


def test_both_backends_write_the_same(artifact: Path) -> None:
    words = ["generate", artifact, "--prompt", "1 2, 3", "--max-new-tokens", "30", "--raw-ids"]
    first = works(*words).out
    assert len(first.split()) == 30
    assert works(*words, "--backend", "reference").out == first


def test_a_prompt_from_standard_input(artifact: Path) -> None:
    wanted = works("generate", artifact, "--prompt", "the é", "--max-new-tokens", "3").out
    words = ["generate", artifact, "--prompt", "-", "--max-new-tokens", "3"]
    assert works(*words, stdin="the é\n").out == wanted
    assert "the prompt is not text in UTF-8 (byte 0 is wrong)" in refused(*words, stdin=b"\xff")


def test_the_summary(artifact: Path) -> None:
    words = ["--prompt", "the", "--max-new-tokens", "4", "--json"]
    found = works("generate", artifact, *words).json
    (entry,) = found["prompts"]
    (answer,) = entry["answers"]
    assert (entry["prompt"], answer["finish"], len(answer["tokens"])) == ("the", "length", 4)
    assert answer["text"] == load(artifact).generate("the", 4)
    assert found["decode_rate"] > 0
    words = ["--prompt", "1 2 3", "--raw-ids", "--max-new-tokens", "500"]
    answer = works("generate", artifact, *words)
    assert len(answer.out.split()) == 96 - 3 + 1
    assert answer.err.endswith("(the cache is full)\n")


def test_a_prompt_may_be_longer_than_a_call(checkpoint: Path, tmp_path: Path) -> None:
    words = ["--raw-ids", "--prompt", " ".join(map(str, range(1, 12))), "--max-new-tokens", "6"]
    found: list[str] = []
    for i, dims in enumerate(("S=1:8:64", "S=1:3:4")):
        works("compile", checkpoint, "-o", tmp_path / str(i), "--dims", dims)
        found.append(works("generate", tmp_path / str(i), *words).out)
    assert found[0] == found[1]


def test_end_tokens_are_those_of_the_artifact(checkpoint: Path, tmp_path: Path) -> None:
    words = ["--raw-ids", "--prompt", "5 17 200", "--max-new-tokens", "10"]
    works("compile", checkpoint, "-o", tmp_path / "out")
    ids = works("generate", tmp_path / "out", *words).out.split()
    folder = write_checkpoint(tmp_path / "model", eos_token_id=[int(ids[4])])
    works("compile", folder, "-o", tmp_path / "short")
    texts = [
        works("generate", tmp_path / "short" / place, *words, *more).out.split()
        for place, more in ((".", []), ("module.irc", ["--backend", "reference"]))
    ]
    assert texts[0] == texts[1] == ids[: ids.index(ids[4])]


def test_ctrl_c_ends_the_line(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = OnnxRuntimeStream.step
    left = iter(range(3))

    def interrupted(self: OnnxRuntimeStream, *inputs: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(self, *inputs)

    monkeypatch.setattr(OnnxRuntimeStream, "step", interrupted)
    answer = irc("generate", artifact, "--raw-ids", "--prompt", "1 2", "--max-new-tokens", "50")
    assert answer.status == 130
    assert len(answer.out.split()) == 3 and answer.out.endswith("\n")
    assert "interrupted" in answer.err and "tokens/s" not in answer.err


def test_a_terminal_shows_the_prompt_dim(artifact: Path) -> None:
    master, slave = pty.openpty()
    words = ["generate", str(artifact), "--prompt", "the", "--max-new-tokens", "5"]
    process = subprocess.Popen([*PROGRAM, *words], cwd=ROOT, stdout=slave, stderr=slave)
    os.close(slave)
    data = b""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(master, 4096):
            data += chunk
    os.close(master)
    assert process.wait(timeout=120) == 0
    shown = data.decode("utf-8", "replace").rpartition("\r\x1b[K")[2]  # after the progress
    assert shown.startswith("\x1b[2mthe\x1b[0m")
    assert "tokens/s" in shown


# ------------------------------------------------------------------ quality


def test_a_model_against_itself(artifact: Path) -> None:
    words = ["quality", artifact, "--against", artifact, "--text", ROOT / "README.md"]
    words += ["--tokens", "300", "--length", "90"]
    facts = works(*words, "--json").json
    assert facts["tokens"] == 296
    assert facts["perplexity"] == facts["reference_perplexity"] > 1
    assert (facts["increase"], facts["kl"], facts["top1"]) == (0.0, 0.0, 1.0)
    shown = works(*words).out
    assert "same likeliest token" in shown and "100.00%" in shown


def test_a_model_alone_on_the_help_of_python(artifact: Path) -> None:
    shown = works("quality", artifact, "--tokens", "200").out
    assert "perplexity" in shown and "KL" not in shown
