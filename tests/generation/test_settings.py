"""Generation settings: ranges, what does not go together, flags, and those of checkpoints."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from irc.cli.arguments import Parser, Usage, add_settings, given_settings
from irc.errors import Error
from irc.generation.checkpoint_settings import CheckpointSettings, ignored_settings
from irc.generation.settings import GenerationSettings
from irc.pipeline.options import settings_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; give a number of at least 0"),
        ({"temperature": NAN}, "temperature is nan; give a finite number of at least 0"),
        ({"temperature": "hot"}, "temperature is 'hot'; give a number"),
        ({"frequency_penalty": INF}, "frequency_penalty is inf; give a finite number"),
        ({"top_k": -1}, "top_k is -1; give a whole number of at least 0"),
        ({"top_k": 2.5}, "top_k is 2.5; give a whole number"),
        ({"top_p": 1.5}, "top_p is 1.5; give a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give more than 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give a whole number of at least 1"),
        ({"min_new_tokens": 101}, "min_new_tokens is 101, more than max_new_tokens"),
        ({"stop": ("a", "")}, "an entry of stop is empty"),
        ({"stop": (1,)}, "an entry of stop is 1; give a list of texts"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; give True, False or"),
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beams is 4, which 3 groups do not divide"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3, but .* 2 beams"),
        ({"num_beams": 2, "temperature": 1.0}, "beam search has no temperature"),
        ({"num_beams": 2, "regex": "a"}, "beam search has no regex"),
        ({"num_beam_groups": 2}, "num_beams is 1, which 2 groups do not divide"),
        ({"regex": "a", "grammar": "b"}, "give one of json_schema, regex, grammar"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        GenerationSettings(**settings)
    with pytest.raises(Error, match=message):
        GenerationSettings().changed(settings)


def test_changes_of_settings() -> None:
    assert GenerationSettings().changed({"stop": "x"}).stop == ("x",)
    settings = GenerationSettings(max_length=50, min_length=9, stop=("x",))
    assert (settings.limit(20), settings.least(5), settings.stop) == (30, 4, ("x",))
    with pytest.raises(Error, match="prompt has 50 tokens, but max_length is 50"):
        settings.limit(50)
    changed = settings.changed({"max_new_tokens": 7, "min_new_tokens": 3, "top_k": None})
    assert (changed.limit(20), changed.least(5), changed.stop) == (7, 3, ("x",))
    assert changed.changed({"max_length": 50, "max_new_tokens": 20}).limit(10) == 20
    with pytest.raises(Error, match=r"generate has no option temprature; did you mean"):
        settings.changed({"temprature": 1})


def parsed(*words: str) -> Namespace:
    parser, declared = Parser("generate", "x", "y"), settings_of(GenerationSettings)
    add_settings(parser, declared.values())
    return Namespace(**given_settings(parser.parse(words), declared))


def test_flags() -> None:
    words = ["--temperature", "0.5", "--presence-penalty", "-1.5", "--stop", "a", "--stop", "b"]
    words += ["--early-stopping", "never", "--no-skip-special-tokens", "--seed", "3"]
    settings = GenerationSettings().changed(vars(parsed(*words)))
    assert settings == GenerationSettings(
        temperature=0.5, presence_penalty=-1.5, stop=("a", "b"), early_stopping="never",
        skip_special_tokens=False, seed=3,
    )  # fmt: skip
    for flag, text, message in (
        ("--temperature", "warm", "'warm' is not a number"),
        ("--temperature", "nan", "temperature is nan; give a finite number"),
        ("--top-p", "2", "top_p is 2.0; give a number from 0 to 1"),
        ("--early-stopping", "soon", "'soon' is none of true, false, never"),
        ("--num-beams", "0", "0 is less than 1"),
    ):
        with pytest.raises(Usage, match=message):
            parsed(flag, text)


def of_file(folder: Path, config: dict[str, Any]) -> CheckpointSettings:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return CheckpointSettings.of_folder(folder)


def test_settings_of_a_checkpoint(tmp_path: Path) -> None:
    assert CheckpointSettings.of_folder(tmp_path) == CheckpointSettings()
    sampled = {"do_sample": True, "top_p": 0.9, "max_length": 4096, "eos_token_id": [1, 2]}
    assert of_file(tmp_path, sampled).defaults == GenerationSettings(
        temperature=1.0, top_k=50, top_p=0.9, max_length=4096
    )
    cold = {"temperature": 0.6, "top_k": 20, "stop_strings": ["###"], "max_new_tokens": 9}
    assert of_file(tmp_path, cold).defaults == GenerationSettings(
        top_k=20, stop=("###",), max_new_tokens=9
    )
    words = {"bad_words_ids": [[3], [4, 5]], "suppress_tokens": [1, -1], "forced_eos_token_id": 2}
    words |= {"begin_suppress_tokens": [6], "forced_bos_token_id": 7, "decoder_start_token_id": 8}
    assert of_file(tmp_path, words) == CheckpointSettings(
        GenerationSettings(), ((3,), (4, 5)), (1,), (6,), 7, (2,), 8
    )
    for wrong in ({"top_p": 7}, {"suppress_tokens": "a"}, {"bad_words_ids": 3}):
        with pytest.raises(Error, match=r"generation_config.json cannot be used: .*; correct it"):
            of_file(tmp_path, wrong)
    beams = {"num_beams": 4, "do_sample": True, "temperature": 0.5, "guidance_scale": 2.0}
    assert of_file(tmp_path, beams).defaults == GenerationSettings(num_beams=4)
    assert ignored_settings(beams) == ["guidance_scale", "do_sample of beams"]
    assert not ignored_settings(sampled | {"guidance_scale": 1.0, "eta_cutoff": 0.0})
