"""Vectors of texts: as sentence-transformers defines them, each as if its text were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.generation.embeddings import embed, gives_embeddings
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.models.cases import SIZES, Case, cases
from tests.models.runners import relative
from tests.models.test_encoders import POOLED, write_modules
from tests.models.test_transformers import oracle
from tests.word_tokenizer import random_texts, write_word_tokenizer

pytestmark = pytest.mark.oracle
WORDS, DIMS = 61, {"B": (1, 2, 4)}
T5 = Case("t5", cases("ENCODER_DECODERS")["t5"].keys, architecture="T5EncoderModel")
MODELS: dict[str, Case] = cases("ENCODERS") | {"t5": T5, "llama": Case("llama", SIZES)}


def prepared(name: str, folder: Path) -> tuple[Any, list[str]]:
    """The model of transformers, saved with a tokenizer, and texts of up to 18 words."""
    model = MODELS[name].save(folder)
    write_word_tokenizer(folder, WORDS)
    return model, random_texts(fresh(), WORDS, fresh().permutation(19).tolist())


def pooled(model: Any, texts: list[str], folder: Path, *modes: str, longest: int = 24) -> Any:
    """The pooled hidden states of every text alone, by transformers and its tokenizer."""
    torch, transformers = oracle()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    rows: list[Any] = []
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=longest, padding=False)["input_ids"]
            states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            rows.append(torch.cat([POOLED[mode](states) for mode in modes or ["mean"]]))
    return torch.stack(rows)


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
@pytest.mark.parametrize("name", ["bert/Model", "roberta/Model", "modernbert/Model", "t5"])
def test_texts_have_the_vectors_that_they_have_alone(name: str, mesh: str, tmp_path: Path) -> None:
    model, texts = prepared(name, tmp_path / "model")
    options: Any = {"backend": "reference", "mesh": mesh} if mesh else {}
    built = irc.compile(tmp_path / "model", tmp_path / "built", dims=DIMS, **options).model
    vectors = embed(built, texts)
    assert vectors.dtype == np.float32 and gives_embeddings(built)
    assert relative(vectors, pooled(model, texts, tmp_path / "model").numpy()) < 1e-4
    assert (embed(built, [built.tokenizer.encode(text) for text in texts]) == vectors).all()


def test_a_folder_of_sentence_transformers_cuts_and_normalizes(tmp_path: Path) -> None:
    torch, _ = oracle()
    folder = tmp_path / "model"
    model, texts = prepared("bert/Model", folder)
    write_modules(folder, {"pooling_mode": ["max", "cls"]}, ("Normalize", None))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9}))
    built = irc.compile(folder, tmp_path / "built", dims=DIMS).model
    with pytest.warns(UserWarning, match=r"^11 of 19 texts have more than 9 tokens"):
        vectors = embed(built, texts)
    wanted = torch.nn.functional.normalize(pooled(model, texts, folder, "max", "cls", longest=9))
    assert relative(vectors, wanted.numpy()) < 1e-4
    for ids, message in (([0] * 10, "has 10 tokens, but this model takes 9"), ([], "no tokens")):
        with pytest.raises(Error, match=message):
            embed(built, [[5], ids])


def test_the_texts_of_clip(tmp_path: Path) -> None:
    torch, _ = oracle()
    model = MODELS["CLIPTextModelWithProjection"].save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built", dims=DIMS)
    rows = [[*fresh(n).integers(8, 61, n).tolist(), 7] for n in (3, 9, 1, 5, 6)]
    with torch.no_grad():
        wanted = [model(input_ids=torch.tensor([row])).text_embeds[0].numpy() for row in rows]
    assert relative(embed(built.model, rows), np.stack(wanted)) < 1e-4


@pytest.mark.parametrize("name", ["bert/ForSequenceClassification", "ViTModel", "llama"])
def test_models_that_give_no_embeddings(name: str, tmp_path: Path) -> None:
    MODELS[name].save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built", backend="reference").model
    with pytest.raises(Error, match=r"gives no embeddings of texts: its outputs are \w+"):
        embed(built, [[5]])


def test_the_command(tmp_path: Path) -> None:
    folder, built = tmp_path / "model", tmp_path / "built"
    model, texts = prepared("bert/Model", folder)
    irc.compile(folder, built)
    wanted = pooled(model, texts, folder).numpy()
    printed = works("embed", built, *(word for text in texts for word in ("--text", text))).out
    assert relative(np.loadtxt(printed.splitlines()), wanted) < 1e-4
    lines, file = tmp_path / "texts.jsonl", tmp_path / "vectors.npy"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    vectors = works("embed", built, "--texts", lines, "--json").json["embeddings"]
    assert relative(np.array(vectors), wanted) < 1e-4
    few = sorted(texts)[-3:]
    works("embed", built, "--texts", "-", "-o", file, stdin="\r\n\n".join(few))
    assert relative(np.load(file), pooled(model, few, folder).numpy()) < 1e-4
    lines.write_text('{"texts": "w6"}\n')
    for message, *given in (
        (f'line 1 of {lines}: expected an object that has "text" (str)', "--texts", lines),
        ("has no text; expected one a line", "--texts", "-"),
        ("cannot write .: ", "--text", "w5", "-o", "."),
    ):
        assert message in refused("embed", built, *given)
    assert "expected --text TEXT or --texts FILE" in refused("embed", built, status=2)
