"""Answers of encoder-decoders to texts and features, against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.generation.encoder_decoder import EncoderDecoder
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.models.test_encoder_decoders import PARTS, saved
from tests.models.test_transformers import oracle
from tests.word_tokenizer import random_texts, write_word_tokenizer

pytestmark = pytest.mark.oracle
WORDS, START = 96, 1
LENGTHS = [9, 1, 14, 5, 7, 2, 11, 3, 6, 4, 8]  # more sources than a call takes rows
CONFIG: dict[str, Any] = {"decoder_start_token_id": START, "eos_token_id": 0, "pad_token_id": START}
CONFIG |= {"max_new_tokens": 12, "no_repeat_ngram_size": 3, "suppress_tokens": [5, 60]}
CONFIG |= {"forced_bos_token_id": 17, "forced_eos_token_id": 0, "begin_suppress_tokens": [33]}
SPEECH: dict[str, Any] = {"forced_bos_token_id": None, "no_repeat_ngram_size": 0}


def write_model(name: str, folder: Path, config: dict[str, Any]) -> Any:
    """The model of transformers, saved with a tokenizer and a generation_config.json."""
    model = saved(name, folder)
    write_word_tokenizer(folder, WORDS, "$A [SEP]")
    (folder / "generation_config.json").write_text(json.dumps(config))
    return model


def compiled(folder: Path, **options: Any) -> EncoderDecoder:
    """Both parts, compiled into folders beside the checkpoint."""
    return EncoderDecoder(
        *(
            irc.compile(folder, folder.parent / part, settings={"part": part}, **options).model
            for part in PARTS
        )
    )


def generated(model: Any, config: dict[str, Any], **inputs: Any) -> list[int] | None:
    """The tokens behind the start; None where two best logits of a step are as good as equal."""
    torch, transformers = oracle()
    settings = transformers.GenerationConfig(**config)
    result = {"output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():  # not Whisper's own generate, which is for 30 seconds of speech
        answers = transformers.GenerationMixin.generate(
            model, **inputs, generation_config=settings, **result
        )
    best = [score.topk(2).values for score in answers.scores]
    is_near = min(float((two[:, 0] - two[:, 1]).min()) for two in best) < 1e-3
    return None if is_near else answers.sequences[0, 1:].tolist()


@pytest.mark.parametrize("mesh", ["", "tp=2"])
@pytest.mark.parametrize("name", ["t5", "bart", "mbart"])
def test_texts_are_answered_as_by_transformers(name: str, mesh: str, tmp_path: Path) -> None:
    torch, _ = oracle()
    model = write_model(name, tmp_path / "model", CONFIG)
    options: Any = {"mesh": mesh, "backend": "reference"} if mesh else {}
    pair = compiled(tmp_path / "model", **options)
    texts, compared = random_texts(fresh(), WORDS, LENGTHS[: 3 if mesh else None]), 0
    for beams in (1,) if mesh else (1, 3):
        answers = pair.completions(texts, pair.defaults.changed({"num_beams": beams}))
        for text, (answer, *_) in zip(texts, answers, strict=True):
            ids = torch.tensor([pair.tokenizer.encode(text)])
            wanted = generated(model, CONFIG | {"num_beams": beams}, input_ids=ids)
            assert wanted in (None, answer.tokens), (text, beams)
            compared += wanted is not None
    assert compared


def test_features_are_answered_as_by_transformers(tmp_path: Path) -> None:
    torch, _ = oracle()
    model = write_model("whisper", tmp_path / "model", CONFIG | SPEECH)
    compiled(tmp_path / "model")
    features = fresh().standard_normal((1, 10, 18)).astype(np.float32)
    np.savez(tmp_path / "in.npz", input_features=features)
    words = ["generate", tmp_path / "decoder", "--encoder", tmp_path / "encoder"]
    words += ["--inputs", tmp_path / "in.npz", "--json"]
    for begin, ids in (([], [START]), (["--prompt", "[PAD]w40 w7"], [START, 40, 7])):
        (facts,) = works(*words, *begin).json["prompts"]
        inputs = {
            "input_features": torch.tensor(features),
            "decoder_input_ids": torch.tensor([ids]),
        }
        wanted = generated(model, CONFIG | SPEECH, **inputs)
        assert wanted in (None, [*ids[1:], *facts["answers"][0]["tokens"]])


def test_the_command(tmp_path: Path) -> None:
    write_model("t5", tmp_path / "model", CONFIG | {"num_beams": 2, "forced_bos_token_id": None})
    pair, texts = compiled(tmp_path / "model"), random_texts(fresh(), WORDS, [4, 9])
    encoder, decoder = tmp_path / "encoder", tmp_path / "decoder"
    prompts = [word for text in texts for word in ("--prompt", text)]
    answer = works("generate", decoder, "--encoder", encoder, *prompts)
    assert answer.out == "".join(f"{text}\n" for text in pair.generate(texts))
    assert "comes from irc generate --encoder DIR" in refused("generate", decoder, *prompts)
    said = refused("generate", decoder, "--encoder", decoder, *prompts)
    assert "are not the encoder and the decoder of one checkpoint" in said


def test_what_is_missing(tmp_path: Path) -> None:
    write_model("t5", tmp_path / "model", {})
    pair = compiled(tmp_path / "model")
    with pytest.raises(Error, match=r"no generation_config.json with a decoder_start_token_id"):
        pair.generate("w5")
    with pytest.raises(Error, match="the prompt has no tokens"):
        pair.completions([[]])
    with pytest.raises(Error, match="E=513, but the model was compiled for E=1 to 512"):
        pair.completions([[5] * 513])
