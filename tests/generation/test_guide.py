"""The guide of generation: its table is that of the settings, its commands and scripts work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import irc
from irc.generation.encoder_decoder import EncoderDecoder
from irc.generation.settings import GenerationSettings
from irc.pipeline.options import settings_of
from tests.cli.runner import works
from tests.generation.test_embeddings import prepared
from tests.generation.test_encoder_decoder import CONFIG, write_model
from tests.layout import ROOT
from tests.models.test_encoder_decoders import PARTS
from tests.models.test_encoders import write_modules

README, GUIDE, FRONTENDS = (
    (ROOT / folder / "README.md").read_text(encoding="utf-8")
    for folder in ("", "irc/generation", "frontends")
)
TEXT = README.partition("## Text\n")[2].partition("## TensorRT-LLM")[0]
PAIR = FRONTENDS.partition("two programs of one folder:\n\n")[2].partition("\n\n")[0]
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["A", "B"]}}, "required": ["name"]}


def test_the_table_of_settings_is_that_of_the_code() -> None:
    rows = [
        f"| `{setting.keyword}` | `{setting.default!r}` | {setting.option.help} |"
        for setting in settings_of(GenerationSettings).values()
    ]
    assert "\n".join(rows) in GUIDE, "the guide needs this table:\n" + "\n".join(rows)


@pytest.mark.oracle
def test_what_the_guides_show_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the checkpoints and the files that they name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "tiny_llama", "Llama")
    Path("Llama/chat_template.jinja").write_text("{{ messages[-1].content }}")
    for name in ("small", "llama3"):
        irc.compile("Llama", f"build/{name}")
    Path("questions.txt").write_text("Beautiful is\nThe Python\n")
    Path("sentences.txt").write_text("w5 w6\nw7\n")
    Path("person.json").write_text(json.dumps(SCHEMA | {"additionalProperties": False}))
    prepared("bert/Model", Path("all-MiniLM-L6-v2"))
    write_modules(Path("all-MiniLM-L6-v2"), {"pooling_mode": "mean"}, ("Normalize", None))
    for name, folder in (("t5", "t5-base"), ("whisper", "whisper")):
        write_model(name, Path(folder), CONFIG)
    for part in PARTS:
        irc.compile("whisper", f"build/whisper_{part}", settings={"part": part})
    np.savez("features.npz", input_features=np.zeros((1, 10, 18), np.float32))
    commands, *pair = PAIR.replace("    ", "").splitlines()
    shown = re.findall(r"^    (irc .*)$", GUIDE + TEXT, re.MULTILINE) + commands.split(";")
    outputs: dict[str, str] = {}
    for words in (shlex.split(line, comments=True)[1:] for line in shown):
        more = ["--help"] if words[0] == "serve" else []
        outputs[words[-2]] = works(*words, *more, stdin="The Python\n").out
    assert outputs["--json-schema"].startswith('A person:{"name"')
    assert re.fullmatch(r"A number:[0-9]{1,3}\n", outputs["--regex"])
    assert np.load("vectors.npy").shape == (2, 36)
    script, client = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec("\n".join([script, *pair]), {"irc": irc, "EncoderDecoder": EncoderDecoder})
    compile(client, "the client", "exec")
    assert len(capsys.readouterr().out.splitlines()) > 4
