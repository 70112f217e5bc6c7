"""`irc generate`: prompts from files, settings from flags and checkpoints, several answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.generation.settings import GenerationSettings
from irc.pipeline.options import settings_of
from tests.cli.runner import refused, works
from tests.tiny_checkpoint import write_checkpoint

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
PROMPTS = ["the other", "a", "there are 12 of them, é", " "]
LIST = 'expected an object that has "prompt" (str) or "messages" (list)'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose checkpoint says nothing about generation."""
    folder = tmp_path_factory.mktemp("plain")
    return irc.compile(write_checkpoint(folder / "model", seed=1), folder / "built").folder


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose checkpoint samples, and has a chat template."""
    folder = tmp_path_factory.mktemp("sampled")
    model = write_checkpoint(folder / "model", seed=1)
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 299, **config}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return irc.compile(model, folder / "built").folder


def flags(settings: dict[str, Any]) -> list[str]:
    return [w for name, x in settings.items() for w in (f"--{name.replace('_', '-')}", str(x))]


def test_prompts_are_answered_in_order_as_they_are_alone(plain: Path, tmp_path: Path) -> None:
    wanted = [works("generate", plain, "--prompt", prompt).out for prompt in PROMPTS]
    assert all(text.startswith(prompt) for text, prompt in zip(wanted, PROMPTS, strict=True))
    file = tmp_path / "prompts.txt"
    file.write_text("\r\n".join(PROMPTS[:3]) + "\n")
    for given, text in ((file, ""), ("-", file.read_text())):
        assert works("generate", plain, "--prompts", given, stdin=text).out == "".join(wanted[:3])
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert works("generate", plain, *words).out == "".join(wanted)


def test_tokens_with_their_log_probabilities(plain: Path) -> None:
    words = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[2], "--json"]
    settings = {"logprobs": 3, "temperature": 1.5, "max_new_tokens": 30}
    printed, model = works("generate", plain, *words, *flags(settings)).json, irc.load(plain).model
    for entry in printed["prompts"]:
        ids, (answer,) = model.tokenizer.encode(entry["prompt"]), entry["answers"]
        assert entry["prompt_tokens"] == len(ids) and answer["finish"] in ("end", "length")
        logits = model.run({"input_ids": [[*ids, *answer["tokens"]]]})["logits"][0]
        rows = logits.astype(np.float64)[len(ids) - 1 : -1]
        wanted = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        of_tokens = wanted[range(len(rows)), answer["tokens"]]
        np.testing.assert_allclose(answer["log_probs"], of_tokens, atol=1e-3)
        best = [[log_prob for _, log_prob in pairs] for pairs in answer["best"]]
        np.testing.assert_allclose(best, -np.sort(-wanted, -1)[:, :3], atol=1e-3)
    assert printed["prefill_rate"] > 0 and printed["decode_rate"] > 0


def test_settings_of_the_checkpoint_hold_and_are_told(sampled: Path, plain: Path) -> None:
    words = ["generate", sampled, "--prompt", "the other", "--max-new-tokens", "20"]
    told = f"generation_config.json of {sampled}: temperature=0.7, top_k=50, top_p=0.9, repeti"
    model = irc.load(sampled).model
    for seed in (0, 5):
        answer = works(*words, *flags({"seed": seed}))
        assert answer.out == f"the other{model.generate('the other', 20, seed=seed)}\n"
        assert answer.reports[0].startswith(told)
    greedy = works(*words, "--temperature", "0", "--repetition-penalty", "1")
    assert greedy.reports[0].endswith(f"{sampled}: top_k=50, top_p=0.9")
    alone = works("generate", plain, *words[2:])
    assert alone.out == greedy.out and len(alone.reports) == 1


@pytest.mark.parametrize(
    "settings", [{"temperature": 2.0, "seed": 3}, {"num_beams": 3, "length_penalty": 0.5}]
)
def test_several_answers(settings: dict[str, Any], plain: Path) -> None:
    settings |= {"num_return_sequences": 2, "max_new_tokens": 9}
    wanted = irc.load(plain).model.generate(["the", "a b"], **settings)
    words = ["generate", plain, "--prompt", "the", "--prompt", "a b", *flags(settings)]
    printed = works(*words, "--json").json["prompts"]
    assert [[answer["text"] for answer in entry["answers"]] for entry in printed] == wanted
    shown = [f"the{text}\n" for text in wanted[0]] + [f"a b{text}\n" for text in wanted[1]]
    assert works(*words).out == "".join(shown) and len({*shown}) == 4


def test_stop_strings_end_the_text(plain: Path) -> None:
    text = irc.load(plain).model.generate("the other", 30)
    words = ["--stop", stop := text[10:13], "--stop", "<nothing>"]
    answer = works("generate", plain, "--prompt", "the other", *words)
    assert answer.out == f"the other{text[: text.index(stop)]}\n"
    assert answer.err.endswith("(--stop)\n")


@pytest.mark.oracle
def test_messages_are_those_of_the_chat_template(sampled: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(sampled / "tokenizer.json"))
    messages = [{"role": "user", "content": "the é"}, {"role": "assistant", "content": "er"}]
    file, model = tmp_path / "chats.jsonl", irc.load(sampled).model
    file.write_text(f'{json.dumps({"messages": messages})}\n{{"prompt": "a"}}\n')
    printed = works("generate", sampled, "--prompts", file, "--json").json["prompts"]
    ids = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, return_dict=False)
    wanted = [[answer.text for answer in of_prompt] for of_prompt in model.completions([ids, "a"])]
    assert [[answer["text"] for answer in entry["answers"]] for entry in printed] == wanted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', f"line 1 of {{}}: {LIST}"),
        ('{"prompt": 5}', f"line 1 of {{}}: {LIST}"),
        ("[", "line 1 of {} is not JSON"),
        ('{"messages": []}', "has no chat template; give prompts in place of messages"),
    ],
)
def test_lines_that_are_no_prompts(line: str, message: str, plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(line)
    assert message.format(file) in refused("generate", plain, "--prompts", file)


def test_every_setting_is_a_flag() -> None:
    text = " ".join(works("generate", "--help").out.split())
    for setting in settings_of(GenerationSettings).values():
        assert setting.flag in text and setting.option.help in text
