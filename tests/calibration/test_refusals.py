"""What calibration refuses, each with a sentence; and the command irc calibrate."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.driver.calibration import calibrate
from irc.driver.sources import Source
from irc.errors import Error
from irc.generation.tokenizer import Tokenizer
from irc.quantization.batches import token_windows
from irc.quantization.statistics import Statistics
from tests.calibration.test_calibrate import MASKED, TWO, saved
from tests.cli.runner import works
from tests.fresh import fresh
from tests.sharded.models import tiny_llama
from tests.tiny_checkpoint import write_tokenizer

SHARDED = TWO.replace("@two", "@two mesh(tp=2)").replace("f32[3", "f32[3@tp").replace("3]", "3@tp]")
X, SHIFT = np.ones((4, 4)), np.zeros(4)


EMPTY = "has no arrays or an empty one; expected a row at least for each input"
NO_LINEAR = "module @m {\n  func @f(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}"
# The text of a model ("" for a Llama), its data: arrays or the name of a file, and the message.
BAD: list[tuple[str, Any, str]] = [
    (TWO, {}, EMPTY),
    (TWO, {"x": X[:0], "shift": SHIFT}, EMPTY),
    (TWO, {"x": X}, "batch 1: the inputs lack shift; the model takes x, shift"),
    (TWO, {"x": X, "shift": SHIFT, "shfit": SHIFT}, "no input 'shfit'; did you mean 'shift'"),
    (TWO, {"x": X[:, :3], "shift": SHIFT}, r"batch 1: the input x has the shape \[2, 3\], but it"),
    (TWO, {"x": X[None, None], "shift": SHIFT}, r"batch 1: the input x has the shape \[1, 1, 4, 4"),
    (TWO, {"x": X * [[1], [1], [np.nan], [1]], "shift": SHIFT}, "batch 2: x has NaN or infinity"),
    (TWO, {"x": X, "shift": SHIFT + np.inf}, "batch 1: shift has NaN or infinity"),
    (TWO, {"x": X.astype(str), "shift": SHIFT}, "x is an array of <U32; expected numbers"),
    (TWO, {"x": np.asfortranarray(X), "shift": SHIFT}, "Fortran order; save numpy.ascontiguous"),
    (
        TWO,
        {"x": X * 3e38, "shift": SHIFT + 3e38},
        "batch 1: the input of a has NaN or infinity; f16",
    ),
    (TWO, {"x": np.ones((600, 1, 4))[:, 0], "shift": SHIFT}, r"has B=600.*B=1 to 512"),
    ("", {"input_ids": [[1, 36, 37]]}, "the token 37, but the model has 37 tokens"),
    ("", {"input_ids": [[1, -1]]}, "the token -1, but the model has 37 tokens"),
    ("", {"input_ids": [[1.5, 2]]}, "input_ids is float64, but it must be i32"),
    ("", {"input_ids": [1, 2]}, r"input_ids has the shape \[2\], but it must be \[B, S\]"),
    ("", {"input_ids": [[1] * 33]}, "33 tokens per row, but the cache of this model holds 32"),
    ("", {"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, r"the shape \[1, 3\]; expected"),
    ("", {"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "attention_mask is 0 everywhere"),
    (
        "",
        {"input_ids": [[1]], "attention_mask": [[1]], "positions": [[0]]},
        "ids alone, not with pos",
    ),
    (TWO, "a.txt", r"text needs a model with the input input_ids \[B, S\], .* x, shift"),
    (MASKED, "a.txt", "text needs a tokenizer"),
    (SHARDED, {"x": X}, "sharded already; calibrate the source that it was made from"),
    (NO_LINEAR, {"x": X}, "no linear with a float weight and no cache of floats, so there is"),
]


@pytest.mark.parametrize(("text", "data", "message"), BAD)
def test_data_that_does_not_fit(text: str, data: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    is_file = isinstance(data, str)
    path = tmp_path / data if is_file else saved(tmp_path / "data.npz", **data)
    module = irc.parse(text) if text else tiny_llama()
    with pytest.raises(Error, match=message):
        calibrate(module, path, tmp_path / "out", batch_size=600 if "600" in message else 2)
    assert not (tmp_path / "out" / "calibration.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 3}, "the length is for text"),
        ({"batches": -1}, "batches is -1; give a whole number of at least 0"),
        ({"memory": 0}, "memory is 0; give a whole number of at least 1"),
    ],
)
def test_wrong_options(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(Error, match=message):
        calibrate(irc.parse(TWO), saved(tmp_path / "a.npz", x=X), tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.txt", b"", "data.txt has no text; expected some sentences"),
        ("data.txt", b"a\xff", "data.txt is not text in UTF-8"),
        ("data.csv", b"a", "is not data: expected a .txt or .npz file, or a folder of such"),
        ("data.npz", b"a", "is not an .npz archive of plain arrays"),
        ("none", None, "there is no .*none; data is a .txt or .npz file"),
        ("both", ("a.txt", "b.npz"), "has both .txt and .npz files; keep one kind"),
        ("empty", (), "is not data: expected"),
    ],
)
def test_files_that_are_no_data(
    name: str, content: Any, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
        for each in content:
            (path / each).write_text("a")
    with pytest.raises(Error, match=message):
        irc.calibrate(checkpoint, path, tmp_path / "out")


def test_windows_are_the_tokens_of_the_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Engine
    from tokenizers.processors import TemplateProcessing

    write_tokenizer(tmp_path)
    engine: Any = Engine.from_file(str(tmp_path / "tokenizer.json"))
    end = engine.token_to_id("<|end|>")
    engine.post_processor = TemplateProcessing("<|end|> $A", None, [("<|end|>", end)])
    engine.save(str(tmp_path / "tokenizer.json"))
    words = fresh(3).choice(["the", "other", "naïve", "日本", "\n", " "], 9_000)
    text = " ".join(words.tolist()) + " end"
    parts = [text[:7], text[7:30_000], text[30_000:]]
    paths = [tmp_path / f"{i}.txt" for i in range(3)]
    for path, part in zip(paths, parts, strict=True):
        path.write_text(part, encoding="utf-8", newline="")
    tokenizer = Tokenizer(tmp_path)
    windows = [window for window, _ in token_windows(paths, tokenizer, 100)]
    assert {len(window) for window in windows[:-1]} == {100}
    assert {window[0] for window in windows} == {end}
    found = [token for window in windows for token in window[1:]]
    assert found == [t for part in parts for t in tokenizer.encode(part, special=False)]
    with pytest.raises(Error, match="no room for text after 1 special tokens"):
        next(token_windows(paths, tokenizer, 1))


def test_an_encoder_takes_text_without_a_mask(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = MASKED.replace("f32[9, 4]", "f32[300, 4]").replace("B=1:2:8", "B=2:2:2")
    (tmp_path / "data.txt").write_text("the other " * 40)
    tokens = Tokenizer(tmp_path).encode("the other " * 40)
    found = calibrate(
        Source("text", irc.parse(text), tmp_path), tmp_path / "data.txt", tmp_path / "out"
    )
    assert found.facts.tokens == len(tokens) // 32 * 32  # rows of 16 tokens, two at a time
    assert found.facts.batches == len(tokens) // 32


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(TWO)
    x = fresh(4).standard_normal((6, 4))
    data = saved(tmp_path / "data.npz", x=x, shift=SHIFT)
    words: list[str | Path] = ["calibrate", tmp_path / "m.irc", "--data", data, "-o"]
    facts = works(*words, tmp_path / "a", "--batch-size", "2", "--gram", "--json").json
    assert (facts["tokens"], facts["batches"], facts["gram"]) == (6, 3, True)
    assert facts["largest"]["a"] == pytest.approx(np.abs(x).max(), rel=1e-6)
    assert Statistics(tmp_path / "a").sites() == ["a", "b"]
    shown = works(*words, tmp_path / "b", "--batches", "1", "--batch-size", "4").out
    assert re.match(r"two: 4 tokens in 1 batches, 2 sites; largest input \S+ at \w\nwrote", shown)


def test_a_checkpoint_folder_by_the_command(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("the other " * 300)
    words: list[str | Path] = ["calibrate", checkpoint, "--data", tmp_path / "data.txt"]
    facts = works(*words, "-o", tmp_path / "a", "--length", "50", "--json").json
    tokens = len(Tokenizer(checkpoint).encode("the other " * 300))
    assert facts["tokens"] == tokens
    assert {"k0", "v1", "lm_head", "model.layers.1.mlp.down_proj"} <= facts["largest"].keys()
    # a range of S that leaves no room for the last, shorter window
    dims = ["--dims", "S=64:64:64", "--batch-size", "2"]
    facts = works(*words, "-o", tmp_path / "b", *dims, "--json").json
    assert facts["tokens"] == tokens // 64 * 64
