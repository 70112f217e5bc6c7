"""`--layout genai`: onnxruntime-genai generates what irc does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from tests.cli.runner import works
from tests.fresh import fresh
from tests.models.runners import continued
from tests.tiny_checkpoint import write_checkpoint

PROMPTS = [[5, 17, 33, 80, 2], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> irc.Artifact:
    folder = tmp_path_factory.mktemp("genai")
    source = write_checkpoint(folder / "checkpoint", seed=5)
    works("compile", source, "-o", folder / "out", "--layout", "genai")
    return irc.load(folder / "out")


def test_the_graph_takes_a_mask_in_place_of_positions(artifact: irc.Artifact) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(artifact.folder / "genai.onnx"))
    shapes = {value.name: value.shape for value in session.get_inputs()}
    caches = {name: [2, *shape[1:]] for name, shape in shapes.items() if name[0] in "kv"}
    given: dict[str, Any] = {
        name: np.zeros([12 if size == "C" else size for size in shape], np.float32)
        for name, shape in caches.items()
    }
    ids = fresh(11).integers(0, 300, (2, 8)).astype(np.int32)
    places = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    wanted = artifact.run({"input_ids": ids, "logit_positions": places})["logits"]
    for part in (slice(0, 6), slice(6, 8)):  # a prompt, then two tokens more
        mask = np.ones((2, part.stop), np.int32)
        given |= {"input_ids": ids[:, part], "positions": places[:, part], "attention_mask": mask}
        logits, *states = map(np.asarray, session.run(None, given))
        given |= dict(zip(caches, states, strict=True))
        np.testing.assert_allclose(logits, wanted[:, part], rtol=1e-4, atol=1e-5)

    given["attention_mask"][1, :7] = 0  # a prompt that is shorter than what it is given
    with pytest.raises(Exception, match="prompts_of_a_batch_have_one_length"):
        session.run(None, given)


def test_the_config_names_what_the_graph_has(artifact: irc.Artifact) -> None:
    config = json.loads((artifact.folder / "genai_config.json").read_text())
    facts: Any = artifact.manifest
    decoder, shape = config["model"]["decoder"], facts["states"]["k1"]
    assert shape == f"f32[B, {decoder['num_key_value_heads']}, C, {decoder['head_size']}]"
    assert decoder["num_hidden_layers"] * 2 == len(facts["states"])
    assert config["model"]["eos_token_id"] == facts["end_tokens"]
    assert config["search"]["max_length"] == facts["dims"]["C"][2]


def test_genai_generates_the_same_tokens(artifact: irc.Artifact) -> None:
    genai: Any = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(artifact.folder))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=17, batch_size=2)
    generator = genai.Generator(model, options)
    generator.append_tokens(PROMPTS)
    while not generator.is_done():
        generator.generate_next_token()
    for row, prompt in enumerate(PROMPTS):
        tokens = continued(artifact, prompt, 12)
        assert [*generator.get_sequence(row)] == [*prompt, *tokens]


@pytest.mark.parametrize("options", [{"mesh": "tp=2"}, {"next_tokens": True}, {"backend": "cuda"}])
def test_what_genai_cannot_load_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", seed=5)
    with pytest.raises(
        irc.Error, match=r"takes a language model for one rank|--layout is for --backend onnx"
    ):
        irc.compile(source, tmp_path / "out", layout="genai", **options)
    assert not (tmp_path / "out").exists()
