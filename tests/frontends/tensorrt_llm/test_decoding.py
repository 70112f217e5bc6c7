"""Engines of scripts against `transformers.generate`: tokens, beams, penalties, words, logits.

Prompts are drawn until no step of the greedy answer is a near tie.
"""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irc.cli.main import main
from irc.errors import Error
from irc.frontends.tensorrt_llm import utilities as profiler
from irc.frontends.tensorrt_llm.builder import BuildConfig, build, get_engine_version
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.models.llama import LLaMAForCausalLM
from irc.frontends.tensorrt_llm.runtime import (
    GenerationSession,
    ModelRunner,
    SamplingConfig,
    to_word_list_format,
)
from irc.frontends.tensorrt_llm.runtime.generation import _prepare_attention_mask, _Runtime
from irc.json_files import read_object
from tests.fresh import fresh

from .llamas import LLAMA, VOCAB, Llama, made

NEW, ROWS, BEAMS, END = 32, 2, 3, VOCAB - 1
# name -> tp, pp, remove_input_padding
ENGINES = {"padded": (1, 1, False), "packed": (1, 1, True), "tp=2,pp=2": (2, 2, True)}
Engine = Callable[[str], Path]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return made(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def engine(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The folder of an engine, which a script of 0.16 would build and save."""

    @cache
    def folder(name: str) -> Path:
        path, (tp, pp, packed) = tmp_path_factory.mktemp("engine") / "engine", ENGINES[name]
        with new_session("0.16"):
            for rank in range(tp * pp):
                mapping = Mapping(tp * pp, rank, tp_size=tp, pp_size=pp)
                model = LLaMAForCausalLM.from_hugging_face(
                    str(llama.folder), "float32", mapping=mapping
                )
                config = BuildConfig(
                    max_batch_size=ROWS * BEAMS, max_input_len=8, max_seq_len=8 + NEW,
                    max_beam_width=BEAMS, gather_context_logits=name == "padded",
                    gather_generation_logits=True,
                )  # fmt: skip
                config.plugin_config.remove_input_padding = packed
                saved = build(model, config)
                assert saved is not None
                saved.save(path)
        return path

    return folder


def logits(llama: Llama, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return llama.torch(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def prompts(llama: Llama) -> list[list[int]]:
    random, drawn = fresh(1), list[list[int]]()
    while len(drawn) < ROWS:
        prompt = random.integers(0, VOCAB, random.integers(1, 8)).tolist()
        best = logits(llama, answer(llama, prompt)).topk(2).values[len(prompt) - 1 :]
        if (best[:, 0] - best[:, 1]).min() > 1e-3:
            drawn.append(prompt)
    return drawn


def answer(llama: Llama, prompt: list[int], **settings: Any) -> Any:
    """The tokens of transformers; with several beams, those of each."""
    settings = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": END, **settings}
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    rows = llama.torch.generate(ids, attention_mask=mask, do_sample=False, **settings).tolist()
    return rows if "num_return_sequences" in settings else rows[0]


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_and_logits(
    name: str, engine: Engine, llama: Llama, prompts: list[list[int]]
) -> None:
    runner = ModelRunner.from_dir(engine(name))
    settings = {"end_id": -1, "pad_id": 0, "max_new_tokens": NEW, "return_dict": True}
    results = runner.generate([torch.tensor(each) for each in prompts], **settings)
    for row, prompt in enumerate(prompts):
        tokens = answer(llama, prompt)
        assert results["output_ids"][row, 0, : len(tokens)].tolist() == tokens
        wanted = logits(llama, tokens)
        chosen = results["generation_logits"][row, 0]
        torch.testing.assert_close(chosen, wanted[len(prompt) - 1 : -1], rtol=1e-4, atol=1e-4)
        if name == "padded":
            prefill = results["context_logits"][row]
            torch.testing.assert_close(prefill, wanted[: len(prompt)], rtol=1e-4, atol=1e-4)


# settings of SamplingConfig, and those of transformers with the same meaning
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beams": ({"num_beams": BEAMS}, {"num_beams": BEAMS, "early_stopping": True}),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "cold": ({"temperature": 0.0}, {}),
}


@pytest.mark.parametrize(
    ("name", "setting"), [("tp=2,pp=2", "beams"), *(("packed", each) for each in SETTINGS)]
)
def test_settings_are_those_of_transformers(
    name: str, setting: str, engine: Engine, llama: Llama, prompts: list[list[int]]
) -> None:
    own, other = SETTINGS[setting]
    runner = ModelRunner.from_dir(engine(name))
    ids = runner.generate(prompts, end_id=END, pad_id=END, max_new_tokens=NEW, **own)
    for row, prompt in enumerate(prompts):
        beams = answer(llama, prompt, eos_token_id=END, num_return_sequences=len(ids[row]), **other)
        for beam, tokens in zip(ids[row].tolist(), beams, strict=True):
            assert beam[: len(tokens)] == tokens and {*beam[len(tokens) :]} <= {END}


@pytest.mark.parametrize("form", [list[Any], to_word_list_format])
def test_words_and_lengths(
    form: Any, engine: Engine, llama: Llama, prompts: list[list[int]]
) -> None:
    runner, (prompt, *_) = ModelRunner.from_dir(engine("packed")), prompts
    new = answer(llama, prompt)[len(prompt) :]
    report = {"return_dict": True, "output_sequence_lengths": True, "output_log_probs": True}
    settings = {"end_id": -1, "pad_id": 0, "max_new_tokens": NEW, **report}
    words = [new[4:6]]
    end = next(at for at in range(2, NEW + 1) if new[at - 2 : at] == words[0])
    results = runner.generate([prompt], stop_words_list=form([words]), **settings)
    assert results["sequence_lengths"].tolist() == [[len(prompt) + end]]
    chances = torch.log_softmax(logits(llama, prompt + new[:end]), -1)
    wanted = chances[np.arange(len(prompt) - 1, len(prompt) + end - 1), new[:end]]
    np.testing.assert_allclose(results["log_probs"][0, 0, :end], wanted, rtol=1e-4, atol=1e-4)
    for banned in (words, [[prompt[-1], new[0]]]):  # a word may begin with the end of the prompt
        tokens = runner.generate([prompt], bad_words_list=form([banned]), **settings)
        wanted = answer(llama, prompt, bad_words_ids=banned)
        assert tokens["output_ids"][0, 0].tolist()[: len(wanted)] == wanted


@pytest.mark.parametrize("given", [np.array, torch.tensor])
def test_results_have_dtypes_of_their_own(given: Any, engine: Engine) -> None:
    session = GenerationSession(None, engine("padded"))
    session.setup(1, 3, 2)
    config = SamplingConfig(-1, 0)
    config.output_cum_log_probs = config.output_log_probs = True
    results = session.decode(given([[3, 1, 4]]), [3], config, return_dict=True)
    kinds = {name: str(array.dtype).removeprefix("torch.") for name, array in results.items()
             if hasattr(array, "dtype")}  # fmt: skip
    floats = dict.fromkeys(("cum_log_probs", "log_probs"), "float32")
    assert kinds == {"output_ids": "int32", **floats}
    assert results["log_probs"].sum() == pytest.approx(float(results["cum_log_probs"][0, 0]))
    assert float(results["cum_log_probs"][0, 0]) % 1


def test_the_attributes_that_scripts_read(engine: Engine) -> None:
    runner = ModelRunner.from_dir(engine("tp=2,pp=2"))
    wanted = {
        "vocab_size": VOCAB, "vocab_size_padded": VOCAB + VOCAB % 2, "num_layers": 3,
        "num_heads": 2, "hidden_size": 12, "dtype": torch.float32, "max_sequence_length": 8 + NEW,
        "remove_input_padding": True, "max_prompt_embedding_table_size": 0,
        "gather_context_logits": False, "gather_generation_logits": True, "use_lora_plugin": False,
        "use_kv_cache": True, "use_gpt_attention_plugin": True, "tokens_per_block": 64,
        "first_layer": 0, "last_layer": 3, "num_heads_kv": 1,
    }  # fmt: skip
    assert {name: getattr(runner, name) for name in wanted} == wanted
    assert not hasattr(runner, "num_headz")


def test_a_folder_of_irc_build_is_an_engine(llama: Llama, tmp_path: Path) -> None:
    words = ["--checkpoint_dir", str(llama.folder), "--output_dir", str(tmp_path / "e")]
    assert main(["build", *words, "--mesh", "tp=2", "--max_batch_size", "2"]) == 0
    assert get_engine_version(tmp_path / "e") == "0.16.0"
    assert read_object(tmp_path / "e" / "config.json")["pretrained_config"]["architecture"]
    runner = ModelRunner.from_dir(tmp_path / "e")
    assert (runner.num_heads, runner.num_layers, runner.max_batch_size) == (2, 3, 2)
    ids = runner.generate([[5, 7, 2]], end_id=-1, pad_id=0, max_new_tokens=4)
    assert ids[0, 0].tolist() == answer(llama, [5, 7, 2], max_new_tokens=4)


def test_the_private_runtime_fills_buffers_in_place(engine: Engine, llama: Llama) -> None:
    runtime = _Runtime(engine("padded"), None)
    ids = torch.tensor([[5, 7, 2], [9, 1, 1]], dtype=torch.int32)
    shapes = {name: runtime.engine.get_tensor_shape(name) for name in runtime.engine.inputs}
    buffers: dict[str, Any] = {
        name: torch.zeros([2 if dim == -1 and at == 0 else 8 if dim == -1 else dim
                           for at, dim in enumerate(shape)])
        for name, shape in shapes.items() if name.startswith("past_key")
    }  # fmt: skip
    buffers |= {name.replace("past", "present"): cache for name, cache in buffers.items()}
    for past, call in ((0, ids[:, :2]), (2, ids[:, 2:])):
        count = call.shape[1]
        one = torch.ones(2, dtype=torch.int32)
        values = {
            "input_ids": call, "position_ids": torch.arange(past, past + count).repeat(2, 1).int(),
            "last_token_ids": one * count, "context_lengths": one * 2,
            "host_past_key_value_lengths": one * past, "sequence_length": one * (past + count),
            "host_request_types": one * bool(past),
        }  # fmt: skip
        runtime._set_shape(runtime.ctx_context, {n: x.shape for n, x in values.items()})
        values["input_ids"] = call.flatten()  # a buffer may have another shape
        runtime._set_buffer(runtime.ctx_context, step := {**buffers, **values})
        assert runtime._run(runtime.ctx_context)
    for row in range(2):
        wanted = logits(llama, ids[row].tolist())[-1]
        torch.testing.assert_close(step["logits"][row, -1], wanted, rtol=1e-4, atol=1e-4)
    mask = _prepare_attention_mask(torch.tensor([[7, 7, 3]]), pad_id=7)
    assert mask.tolist() == [[1, 0, 1]] and mask.dtype == torch.int32


def test_profiler() -> None:
    with new_session():
        seconds = [profiler.start("x") or profiler.stop("x") for _ in range(2)]
        assert profiler.elapsed_time_in_sec("x") == sum(seconds) > 0
        assert profiler.elapsed_time_in_sec("y") is None
        used, free, total = profiler.host_memory_info()
        assert 0 < used < total and free < total
        with pytest.raises(Error, match=r"without profiler\.start"):
            profiler.stop("y")
