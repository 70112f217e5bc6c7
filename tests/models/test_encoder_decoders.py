"""Encoders and decoders of every family against transformers, and generation with both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import Program
from irc.frontends import Module, huggingface, layers, random_weights
from irc.frontends.layers.attention import Cache
from irc.generation.checkpoint_settings import CheckpointSettings
from irc.generation.decoding import Decoding
from irc.generation.rules import DecodingRules
from irc.generation.search import Sampled
from irc.generation.settings import GenerationSettings
from tests.tensorrt.runtime_world import World, write

from .cases import TABLES, Case, cases, to_build
from .runners import program, relative
from .test_transformers import oracle, tokens

pytestmark = pytest.mark.oracle
ENCODER_DECODERS: dict[str, Case] = cases("ENCODER_DECODERS")
MESHES = [(name, mesh) for name, case in ENCODER_DECODERS.items() for mesh in case.meshes]
PARTS = ("encoder", "decoder")
# Engines take the longest to build: every run builds those of two families, by its seed.
BUILT = to_build(ENCODER_DECODERS, 1, 14)
LENGTHS, STEPS = np.array([9, 5], np.int32), 32
Arrays = Mapping[str, np.ndarray]


def saved(name: str, folder: Path, dtype: str = "float32") -> Any:
    """The model of a case, saved to a folder.

    Tables are small and products large, so that a token is not always followed by itself, and the
    biases of logits are not zeros.
    """
    torch, _ = oracle()
    model = ENCODER_DECODERS[name].save(folder, dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter *= 0.2 if "shared" in key or "embed" in key else 2.0
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias += 0.2 * torch.randn_like(model.final_logits_bias)
    model.save_pretrained(folder)
    return model


def sources(model: Any) -> tuple[Arrays, dict[str, Any]]:
    """The inputs of the encoder, for irc and for transformers; one row has padding."""
    torch, _ = oracle()
    if model.config.model_type == "whisper":
        x = np.random.default_rng(2).standard_normal((2, 10, 18)).astype(np.float32)
        return {"input_features": x}, {"input_features": torch.tensor(x)}
    ids = tokens(9, seed=2)
    mask = (np.arange(9) < LENGTHS[:, None]).astype(np.int64)
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return {"input_ids": ids.astype(np.int32), "encoder_lengths": LENGTHS}, inputs


def compiled(folder: Path, part: str, backend: str, mesh: str = "") -> Program:
    """The program of a part of the model in `folder`."""
    settings, options = {"part": part}, {"mesh": mesh} if mesh else {}
    built = folder / f"{part}_{backend}"
    return irc.compile(
        folder / "model", built, backend=backend, settings=settings, **options
    ).program


def run(parts: list[Program], source: Arrays, pieces: list[np.ndarray]) -> Any:
    """The states of the encoder, and the logits of the decoder's tokens in pieces."""
    encoder, decoder = parts
    state = encoder.run(source)
    hidden = state.pop("last_hidden_state")
    state |= {name: array for name, array in source.items() if name == "encoder_lengths"}
    stream, past, logits = decoder.open({"B": 2, "C": 64, "E": 9}), 0, list[np.ndarray]()
    for ids in pieces:
        steps = np.arange(ids.shape[1], dtype=np.int32)
        call = {
            "input_ids": ids.astype(np.int32),
            "positions": np.tile(past + steps, (2, 1)),
            "past_lengths": np.full(2, past, np.int32),
            "logit_positions": np.tile(steps, (2, 1)),
        }
        logits.append(stream.step(call | state)["logits"])
        past += ids.shape[1]
    return hidden, np.concatenate(logits, 1)


def outputs(model: Any, ids: np.ndarray) -> Any:
    """The states of the encoder, and the logits of tokens, in transformers and f32."""
    torch, _ = oracle()
    inputs = sources(model)[1]
    for name, array in inputs.items():
        inputs[name] = array.to(model.dtype) if array.is_floating_point() else array
    with torch.no_grad():
        out = model(**inputs, decoder_input_ids=torch.tensor(ids))
    return out.encoder_last_hidden_state.float().numpy(), out.logits.float().numpy()


def check(model: Any, parts: list[Program], pieces: list[int]) -> None:
    """Compare the encoder, and the decoder's logits of tokens in pieces, with transformers."""
    source, ids = sources(model)[0], tokens(sum(pieces), seed=3)
    wanted, logits = outputs(model, ids)
    hidden, got = run(parts, source, np.split(ids, np.cumsum(pieces)[:-1], 1))
    for row, length in enumerate(source.get("encoder_lengths", [9, 9])):
        assert relative(hidden[row, :length], wanted[row, :length]) < 1e-4
    for at in range(ids.shape[1]):
        assert relative(got[:, at], logits[:, at]) < 1e-4


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_both_parts_agree_with_transformers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = saved(name, folder)
    for backend, pieces in (("onnx", [4, 1, 4] + [1] * STEPS), ("reference", [9, 1, 1])):
        encoder = program(huggingface.load(folder, part="encoder"), backend, tmp_path / "encoder")
        decoder = program(huggingface.load(folder), backend, tmp_path / "decoder")
        check(model, [encoder, decoder], pieces)


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_both_parts_on_several_ranks(name: str, mesh: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "model")
    parts = [compiled(tmp_path, part, "reference", mesh) for part in PARTS]
    check(model, parts, [5, 3, 1])


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_both_parts_in_bf16_lose_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    assert TABLES["ENCODER_DECODERS"][1] == ("f32", "bf16")
    model, ids = saved(name, tmp_path / "model", "bfloat16"), tokens(40, seed=3)
    parts = [compiled(tmp_path, part, "reference") for part in PARTS]
    source, (_, rounded) = sources(model)[0], outputs(model, ids)
    _, wanted = outputs(model.float(), ids)
    _, got = run(parts, source, [ids])
    ours, theirs = (np.abs(logits - wanted).max(-1) for logits in (got, rounded))
    assert np.quantile(ours, 0.9) < 1.5 * np.quantile(theirs, 0.9)


@pytest.mark.parametrize("name", [n for n, case in ENCODER_DECODERS.items() if case.schemes])
def test_caches_of_codes(name: str, tmp_path: Path) -> None:
    model, ids = saved(name, tmp_path / "model"), tokens(16, seed=3)
    encoder, source = compiled(tmp_path, "encoder", "onnx"), sources(model)[0]
    lengths = {name: array for name, array in source.items() if name == "encoder_lengths"}
    state: dict[str, Any] = encoder.run(source) | lengths
    del state["last_hidden_state"]
    np.savez(tmp_path / "data.npz", input_ids=ids, **state)
    decoder = irc.compile(
        tmp_path / "model", tmp_path / "out", kv_cache="int8", calibration=tmp_path / "data.npz"
    )
    dtypes = {str(arg.name): arg.type.dtype for arg in decoder.module.main.args}
    assert (dtypes["k0"], dtypes["cross_k0"]) == ("i8", "f32")
    _, got = run([encoder, decoder.program], source, np.split(ids, [7, 12], 1))
    assert 0 < relative(got, outputs(model, ids)[1]) < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_both_parts_on_a_gpu(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "model")
    check(model, [compiled(tmp_path, part, "cuda") for part in PARTS], [5, 3, 1])


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_every_operation_has_a_kernel(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "model", "bfloat16")
    for part in PARTS:
        irc.compile(tmp_path / "model", tmp_path / part, backend="cuda", settings={"part": part})


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", BUILT)
def test_tensorrt_builds_both_parts(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "model", "bfloat16")
    for part in PARTS:
        built = tmp_path / part
        irc.compile(tmp_path / "model", built, backend="tensorrt-rtx", settings={"part": part})


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_generation_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    torch, transformers = oracle()
    model = saved(name, tmp_path / "model")
    source, inputs = sources(model)
    encoder = irc.compile(tmp_path / "model", tmp_path / "encoder", settings={"part": "encoder"})
    decoder = irc.compile(tmp_path / "model", tmp_path / "decoder")
    decoder.model.ends, decoder.model.checkpoint = (), CheckpointSettings()  # BART's forced end
    state = encoder.run(source)
    rules = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    rules["forced_eos_token_id"] = None  # BART's
    for beams in (1, 3):
        settings = GenerationSettings(max_new_tokens=20, num_beams=beams)
        extra = {**state, "encoder_lengths": LENGTHS}
        got = decoder.model.completions([[1], [1]], settings, extra=extra)
        with torch.no_grad():  # not Whisper's own generate, which is for 30 seconds of speech
            wanted = transformers.GenerationMixin.generate(
                model, **inputs, **rules, num_beams=beams
            )
        assert [[1, *row[0].tokens] for row in got] == wanted.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_encoder_returned_is_copied_to_a_gpu_once(ranks: int, tmp_path: Path) -> None:
    model = saved("t5", tmp_path / "model")
    state = irc.evaluate(huggingface.load(tmp_path / "model", part="encoder"), sources(model)[0])
    extra = state | {"encoder_lengths": LENGTHS}

    def generated(loaded: Program, dims: Any) -> list[list[int]]:
        rules = DecodingRules(GenerationSettings(), 8)
        searches = [Sampled([1], rules, np.random.default_rng(row)) for row in range(2)]
        decoding = Decoding(loaded, dims, searches, extra)
        assert len(list(decoding.steps())) == 8
        return decoding.sequences()

    mesh = f"tp={ranks}" if ranks > 1 else ""
    facts = write(tmp_path / "built", huggingface.load(tmp_path / "model"), mesh)
    world = World(tmp_path / "built", facts, self_test=False)
    wanted = program(huggingface.load(tmp_path / "model"), "reference", tmp_path / "reference")
    found = world.of_all(lambda loaded: generated(loaded, facts["dims"]))
    assert found == [generated(wanted, facts["dims"])] * ranks
    uploads = [call[2] for call in world.gpus[0].calls if call[0] == "upload"]
    # the heads of this rank, of keys and values of two layers
    assert uploads.count(state["cross_k0"].nbytes // ranks) == 4
    world.close()


def test_an_encoder_alone(tmp_path: Path) -> None:
    torch, _ = oracle()
    case = Case("t5", ENCODER_DECODERS["flan_t5"].keys, architecture="T5EncoderModel")
    model = case.save(tmp_path / "model")
    source, inputs = sources(model)
    got = irc.evaluate(huggingface.load(tmp_path / "model"), source)
    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state.numpy()
    assert list(got) == ["last_hidden_state"]
    assert relative(got["last_hidden_state"][1, :5], wanted[1, :5]) < case.limit


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """Checkpoints of T5 1.1 have one; transformers 5 calls it tied nevertheless."""
    torch, _ = oracle()
    model = saved("flan_t5", tmp_path / "model")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(tmp_path / "model")
    encoder = program(huggingface.load(tmp_path / "model", part="encoder"), "reference", tmp_path)
    with pytest.warns(UserWarning, match=r"lm_head.weight and shared.weight have different values"):
        module = huggingface.load(tmp_path / "model")
    check(model, [encoder, program(module, "reference", tmp_path)], [5])
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    untied = program(huggingface.load(path.parent), "reference", tmp_path)
    check(model, [encoder, untied], [5])


def test_parts_and_inputs_that_are_missing(tmp_path: Path) -> None:
    saved("t5", tmp_path / "model")
    folder, out = tmp_path / "model", tmp_path / "out"
    with pytest.raises(irc.Error, match=r"t5 has no part 'middle'; its parts are decoder, encoder"):
        irc.compile(folder, out, settings={"part": "middle"})
    with pytest.raises(irc.Error, match=r"no setting 'parts'; it takes ignore=key,key and part="):
        irc.compile(folder, out, settings={"parts": "encoder"})
    decoder = irc.compile(folder, out).model
    with pytest.raises(irc.Error, match="the inputs lack encoder_lengths, cross_k0"):
        decoder.run({"input_ids": [[1, 2]]})
    with pytest.raises(irc.Error, match="generation has no value for encoder_lengths, cross_k0"):
        decoder.completions([[1]])
    encoder = irc.compile(folder, tmp_path / "encoder", settings={"part": "encoder"}).model
    with pytest.raises(irc.Error, match="this model is not a language model"):
        encoder.completions([[1]])
    state = encoder.run({"input_ids": [[1, 2, 3]], "encoder_lengths": [3]})
    with pytest.raises(irc.Error, match=r"expected a row for each of 2 prompts"):
        decoder.completions([[1], [1]], extra=state | {"encoder_lengths": [3, 3]})


def test_cross_attention_over_keys_and_values_that_are_ready() -> None:
    """They give what the sequence that they come from gives."""

    class Both(Module):
        def __init__(self) -> None:
            self.attn = layers.Attention(24, 4, 2, 8, qk_norm=1e-6, clip=0.5, memory_size=12)

        def forward(self, x: Any, memory: Any, lengths: Any) -> Any:
            ready = self.attn.memory_cache(memory)
            assert isinstance(ready, Cache)
            return [self.attn(x, memory=m, lengths=lengths) for m in (memory, ready)]

    shapes = {"x": (2, 3, 24), "memory": (2, 5, 12)}
    specs = {name: irc.Spec("f32", shape) for name, shape in shapes.items()}
    module = irc.trace(Both(), specs | {"lengths": irc.Spec("i32", (2,))})
    random = np.random.default_rng(4)
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    weights = random_weights(module, seed=1)
    one, other = irc.evaluate(weights, arrays | {"lengths": np.array([5, 2], np.int32)}).values()
    assert relative(other, one) < 1e-6
