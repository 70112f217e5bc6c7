"""Engines of scripts against transformers: tokens, beams, penalties, words, streams, logits.

Prompts are drawn until no step of the greedy answer is a near tie.
"""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import irc
from irc.cli.main import main
from irc.errors import Error
from irc.frontends.tensorrt_llm import utilities as profiler
from irc.frontends.tensorrt_llm.builder import BuildConfig, build, get_engine_version
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.models.decoder import optimize_model
from irc.frontends.tensorrt_llm.models.llama import LLaMAForCausalLM
from irc.frontends.tensorrt_llm.runtime import (
    GenerationSession,
    ModelRunner,
    SamplingConfig,
    Session,
    TensorInfo,
    to_word_list_format,
)
from irc.frontends.tensorrt_llm.runtime.generation import _prepare_attention_mask, _Runtime
from irc.generation.inputs import complete
from irc.json_files import read_object
from tests.fresh import fresh

from .llamas import VOCAB, Llama

NEW, ROWS, BEAMS, END = 32, 2, 3, VOCAB - 1
PACKED, PLAIN = {"remove_input_padding": True}, {"gpt_attention_plugin": None}
# name -> tp, pp, fields of BuildConfig, and of its PluginConfig
ENGINES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "padded": (1, 1, {"gather_context_logits": True}, {}), "packed": (1, 1, {}, PACKED),
    "tp=2,pp=2": (2, 2, {}, PACKED), "plain": (1, 1, {}, PLAIN), "without mask": (1, 1, {}, PLAIN),
    "without caches": (1, 1, {"kv_cache_type": "disabled"}, PLAIN),
    "prompt table": (1, 1, {"max_prompt_embedding_table_size": 8}, {}),
}  # fmt: skip
Prompts = list[list[int]]
REPORT = {
    "return_dict": True, "output_sequence_lengths": True, "output_cum_log_probs": True,
    "output_log_probs": True,
}  # fmt: skip


def without_mask(model: Any) -> None:
    """Attention of the model sees all keys."""
    forward = model.forward
    model.forward = lambda attention_mask, **inputs: forward(attention_mask=None, **inputs)


@pytest.fixture(scope="module")
def engine(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an engine, which a script of 0.16 would build and save; or of irc's own."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("engine") / "engine"
        if name == "own":
            irc.compile(llama.folder, path, backend="reference")
            return path
        tp, pp, fields, switches = ENGINES[name]
        with new_session("0.16"):
            for rank in range(tp * pp):
                mapping = Mapping(tp * pp, rank, tp_size=tp, pp_size=pp)
                model: Any = LLaMAForCausalLM.from_hugging_face(
                    str(llama.folder), "float32", mapping=mapping
                )
                if name == "without mask":
                    without_mask(model)
                model = optimize_model(model, use_prompt_tuning=name == "prompt table")
                sizes = {"max_batch_size": ROWS * BEAMS, "max_input_len": 8, "max_seq_len": 8 + NEW}
                fields = {"gather_generation_logits": name in list(ENGINES)[:3], **fields}
                config = BuildConfig(max_beam_width=BEAMS, **sizes, **fields)
                for switch, value in switches.items():
                    setattr(config.plugin_config, switch, value)
                saved = build(model, config)
                assert saved is not None
                saved.save(path)
        return path

    return folder


@pytest.fixture
def runner(engine: Callable[[str], Path]) -> Callable[[str], Any]:
    return lambda name: ModelRunner.from_dir(engine(name))


def logits(llama: Llama, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return llama.torch(torch.tensor([tokens])).logits[0]


def log_probabilities(llama: Llama, tokens: list[int], prompt: int) -> np.ndarray[Any, Any]:
    """Those of the tokens behind a prompt."""
    chances = torch.log_softmax(logits(llama, tokens), -1)
    return chances[np.arange(prompt - 1, len(tokens) - 1), tokens[prompt:]].numpy()


@pytest.fixture(scope="module")
def prompts(llama: Llama) -> Prompts:
    random, drawn = fresh(1), Prompts()
    while len(drawn) < ROWS:
        prompt = random.integers(1, END, random.integers(1, 8)).tolist()  # neither 0 nor END pads
        best = logits(llama, answer(llama, prompt)).topk(2).values[len(prompt) - 1 :]
        if (best[:, 0] - best[:, 1]).min() > 1e-3:
            drawn.append(prompt)
    return drawn


def answer(llama: Llama, prompt: list[int], count: int = NEW, **settings: Any) -> Any:
    """The tokens of transformers; with several beams, those of each."""
    settings = {"max_new_tokens": count, "eos_token_id": None, "pad_token_id": END, **settings}
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    rows = llama.torch.generate(ids, attention_mask=mask, do_sample=False, **settings).tolist()
    return rows if "num_return_sequences" in settings else rows[0]


@pytest.mark.parametrize("name", [*ENGINES][:4])
def test_greedy_tokens_and_logits(name: str, runner: Any, llama: Llama, prompts: Prompts) -> None:
    settings = {"end_id": -1, "pad_id": 0, "max_new_tokens": NEW, "return_dict": True}
    results = runner(name).generate([torch.tensor(prompt) for prompt in prompts], **settings)
    for row, prompt in enumerate(prompts):
        tokens = answer(llama, prompt)
        assert results["output_ids"][row, 0, : len(tokens)].tolist() == tokens
        wanted = logits(llama, tokens)
        if "generation_logits" in results:
            chosen = results["generation_logits"][row, 0]
            torch.testing.assert_close(chosen, wanted[len(prompt) - 1 : -1], rtol=1e-4, atol=1e-4)
        if name == "padded":
            prefill = results["context_logits"][row]
            torch.testing.assert_close(prefill, wanted[: len(prompt)], rtol=1e-4, atol=1e-4)
    assert ("generation_logits" in results) == (name != "plain")


@pytest.mark.parametrize("name", ["padded", "plain", "own"])
def test_irc_generates_the_same(
    name: str, engine: Any, llama: Llama, prompts: Prompts, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = engine(name) if name == "own" else engine(name) / "artifact"
    words = ["--prompt", " ".join(map(str, prompts[0])), "--raw-ids", "--max-new-tokens", "5"]
    assert main(["generate", str(folder), *words]) == 0
    wanted = answer(llama, prompts[0], 5)[len(prompts[0]) :]
    assert [*map(int, capsys.readouterr().out.split())] == wanted


# settings of SamplingConfig, and those of transformers with the same meaning
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beams": ({"num_beams": BEAMS}, {"num_beams": BEAMS, "early_stopping": True}),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "cold": ({"temperature": 0.0}, {}),
}
RUNS = [(name, "beams") for name in ("tp=2,pp=2", "plain", "own")]


@pytest.mark.parametrize(
    ("name", "setting"), [*RUNS, *(("packed", setting) for setting in SETTINGS)]
)
def test_settings_are_those_of_transformers(
    name: str, setting: str, runner: Any, llama: Llama, prompts: Prompts
) -> None:
    own, other = SETTINGS[setting]
    settings = {"end_id": END, "pad_id": END, "max_new_tokens": NEW, **REPORT}
    results = runner(name).generate(prompts, **settings, **own)
    for row, prompt in enumerate(prompts):
        ids, sums = results["output_ids"][row].tolist(), results["cum_log_probs"][row]
        beams = answer(llama, prompt, eos_token_id=END, num_return_sequences=len(ids), **other)
        for beam, tokens, total in zip(ids, beams, sums, strict=True):
            assert beam[: len(tokens)] == tokens and {*beam[len(tokens) :]} <= {END}
            if setting == "beams":
                end = tokens.index(END, len(prompt)) + 1 if END in tokens[len(prompt) :] else None
                wanted = log_probabilities(llama, tokens[:end], len(prompt)).sum()
                np.testing.assert_allclose(total, wanted, rtol=1e-4)


@pytest.mark.parametrize("form", [list[Any], to_word_list_format])
def test_words_and_lengths(form: Any, runner: Any, llama: Llama, prompts: Prompts) -> None:
    packed, (prompt, *_) = runner("packed"), prompts
    new = answer(llama, prompt)[len(prompt) :]
    settings = {"end_id": -1, "pad_id": 0, "max_new_tokens": NEW, **REPORT}
    words = [new[4:6]]
    end = next(at for at in range(2, NEW + 1) if new[at - 2 : at] == words[0])
    results = packed.generate([prompt], stop_words_list=form([words]), **settings)
    assert results["sequence_lengths"].tolist() == [[len(prompt) + end]]
    wanted = log_probabilities(llama, prompt + new[:end], len(prompt))
    np.testing.assert_allclose(results["log_probs"][0, 0, :end], wanted, rtol=1e-4, atol=1e-4)
    for banned in (words, [[prompt[-1], new[0]]]):  # a word may begin with the end of the prompt
        tokens = packed.generate([prompt], bad_words_list=form([banned]), **settings)
        wanted = answer(llama, prompt, bad_words_ids=banned)
        assert tokens["output_ids"][0, 0].tolist()[: len(wanted)] == wanted


def test_the_end_token_stops_a_row(runner: Any, llama: Llama, prompts: Prompts) -> None:
    prompt = prompts[0]
    end = answer(llama, prompt)[len(prompt) + 2]
    wanted = answer(llama, prompt, eos_token_id=end)
    results = runner("plain").generate([prompt], end_id=end, max_new_tokens=NEW, **REPORT)
    assert results["sequence_lengths"].tolist() == [[len(wanted)]]
    filled = wanted + [end] * (len(prompt) + NEW - len(wanted))
    assert results["output_ids"][0, 0].tolist() == filled
    assert (results["log_probs"][0, 0] != 0).sum() == len(wanted) - len(prompt)


def test_a_sampled_token_is_as_likely_as_the_model_says(
    runner: Any, llama: Llama, prompts: Prompts
) -> None:
    prompt = prompts[0]
    config = SamplingConfig(-1, 0, top_k=4, top_p=0.9, temperature=5.0, random_seed=3)
    draws, again = (
        runner("padded").generate([prompt] * 16, sampling_config=config, max_new_tokens=1)
        for _ in range(2)
    )
    assert draws.tolist() == again.tolist()
    best = (logits(llama, prompt)[-1] / 5).topk(4)
    chances = torch.softmax(best.values, 0)
    kept = best.indices[chances.cumsum(0) - chances < 0.9]
    tokens = {*draws[:, 0, len(prompt)].tolist()}
    assert tokens <= {*kept.tolist()} and len(tokens) > 1


def test_streaming_gives_one_result_per_token(runner: Any, llama: Llama, prompts: Prompts) -> None:
    prompt, wanted = prompts[0], answer(llama, prompts[0], 4)
    results = runner("padded").generate([prompt], end_id=-1, max_new_tokens=4, streaming=True)
    for count, ids in zip(range(len(prompt) + 1, len(wanted) + 1), results, strict=True):
        assert ids[0, 0, :count].tolist() == wanted[:count]


def test_an_argument_of_decode_holds_for_one_call(
    runner: Any, llama: Llama, prompts: Prompts
) -> None:
    config, session, prompt = SamplingConfig(-1, 0), runner("padded").session, prompts[0]
    session.setup(1, len(prompt), 5)
    once = session.decode([prompt], [len(prompt)], config, no_repeat_ngram_size=1)
    tokens = once[0, 0].tolist()
    assert len({*tokens[len(prompt) :]}) == 5 and not {*tokens[len(prompt) :]} & {*prompt}
    again = session.decode([prompt], [len(prompt)], config)
    assert again[0, 0].tolist() == answer(llama, prompt, 5)


def test_hooks_see_and_change_the_tokens(runner: Any, prompts: Prompts) -> None:
    steps: list[int] = []

    def processor(step: int, ids: Any, scores: Any) -> Any:
        steps.append(step)
        chosen = np.arange(VOCAB) == step * 5 + 1
        return np.where(chosen, 1e4, scores)

    ids = runner("padded").generate(
        prompts[:1], end_id=-1, max_new_tokens=5, logits_processor=processor,
        stopping_criteria=lambda step, ids, scores: step == 2,
    )  # fmt: skip
    assert steps == [0, 1, 2]
    assert ids[0, 0, len(prompts[0]) :].tolist()[:3] == [1, 6, 11]


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_of_a_prompt_table_have_ids_behind_the_vocabulary(
    beams: int, runner: Any, llama: Llama
) -> None:
    table, tuned = fresh(2).standard_normal((2, 2, 24), np.float32), runner("prompt table")
    ids = np.array([[VOCAB, VOCAB + 1, 3], [VOCAB + 1, 5, VOCAB]])
    settings: dict[str, Any] = {"end_id": -1, "max_new_tokens": 1, "num_beams": beams}
    tasks = [1, 0]
    results = tuned.generate(ids, prompt_table=table, prompt_tasks="1,0", **settings)
    tuned.session.setup(2, 3, 1, beams)
    inputs = {"prompt_embedding_table": table.reshape(4, 24), "tasks": tasks}
    inputs |= {"prompt_vocab_size": [2]}
    config = SamplingConfig(-1, 0, num_beams=beams)
    given = tuned.session.decode_batch(list(ids), config, inputs=inputs)
    embedded = llama.torch.get_input_embeddings()(torch.tensor(np.minimum(ids, END))).detach()
    for row, task in enumerate(tasks):
        places = np.flatnonzero(ids[row] >= VOCAB)
        embedded[row, places] = torch.from_numpy(table[task, ids[row, places] - VOCAB])
    with torch.no_grad():
        wanted = llama.torch(inputs_embeds=embedded).logits[:, -1].topk(beams).indices
    assert results[:, :, -1].tolist() == given[:, :, -1].tolist() == wanted.tolist()
    assert results[:, 0, :3].tolist() == ids.tolist()
    with pytest.raises(Error, match=r"no value for prompt_embedding_table, .*; use irc run"):
        tuned.session.decode_batch([[1, 2, 3], [4, 5, 6]], config)
    with pytest.raises(Error, match=f"has the token {VOCAB + 4}, but the model has {VOCAB + 4}"):
        tuned.generate([[VOCAB + 4]], prompt_table=table, **settings)


def test_a_model_without_caches_predicts_one_token(runner: Any, llama: Llama) -> None:
    alone = runner("without caches")
    ids = alone.generate([[3, 1, 4]], end_id=-1, max_new_tokens=1)
    assert ids[0, 0].tolist() == answer(llama, [3, 1, 4], 1) and not alone.use_kv_cache
    with pytest.raises(Error, match=r"this model is not a language model, which has .* caches"):
        alone.generate([[3, 1, 4]], end_id=-1, max_new_tokens=2)


def test_prompts_of_one_length_without_a_mask(runner: Any, llama: Llama) -> None:
    batch = [[3, 1, 4], [1, 5, 9]]
    ids = runner("without mask").generate(batch, end_id=-1, max_new_tokens=4)
    assert ids[:, 0].tolist() == [answer(llama, prompt, 4) for prompt in batch]
    with pytest.raises(Error, match=r"no attention_mask, which tells padding.* found 2, 3"):
        runner("without mask").generate([[1, 2], [1, 2, 3]], end_id=-1)
    with pytest.raises(Error, match=f"new tokens are 41, but the caches of this .* hold {8 + NEW}"):
        runner("plain").generate([[1] * 8], end_id=-1, max_new_tokens=33)
    with pytest.raises(Error, match="a prompt has the token 4, which is pad_id"):
        runner("plain").generate([[1, 2, 4]], end_id=-1, pad_id=4)


@pytest.mark.parametrize("given", [np.array, torch.tensor])
def test_results_have_dtypes_of_their_own(
    given: Any, engine: Any, llama: Llama, prompts: Prompts
) -> None:
    """Of padded rows, whose tokens and sums are those of transformers."""
    session, lengths = GenerationSession(None, engine("padded")), [*map(len, prompts)]
    session.setup(ROWS, 7, 4)
    config = SamplingConfig(-1, 0)
    config.output_cum_log_probs = config.output_log_probs = True
    padded = [prompt + [0] * (7 - len(prompt)) for prompt in prompts]
    results = session.decode(given(padded), lengths, config, return_dict=True)
    kinds = {name: str(array.dtype).removeprefix("torch.") for name, array in results.items()
             if hasattr(array, "dtype")}  # fmt: skip
    floats = dict.fromkeys(("cum_log_probs", "log_probs"), "float32")
    assert kinds == {"output_ids": "int32", **floats}
    for row, prompt in enumerate(prompts):
        tokens = answer(llama, prompt, 4)
        assert results["output_ids"][row, 0, : len(tokens)].tolist() == tokens
        wanted = log_probabilities(llama, tokens, len(prompt)).sum()
        assert float(results["cum_log_probs"][row, 0]) == pytest.approx(wanted, rel=1e-4)
        assert float(results["log_probs"][row].sum()) == pytest.approx(wanted, rel=1e-4)


def test_the_attributes_that_scripts_read(runner: Any) -> None:
    wanted = {
        "vocab_size": VOCAB, "vocab_size_padded": VOCAB + VOCAB % 2, "num_layers": 3,
        "num_heads": 2, "hidden_size": 12, "dtype": torch.float32, "max_sequence_length": 8 + NEW,
        "remove_input_padding": True, "max_prompt_embedding_table_size": 0,
        "gather_context_logits": False, "gather_generation_logits": True, "use_lora_plugin": False,
        "use_kv_cache": True, "use_gpt_attention_plugin": True, "tokens_per_block": 64,
        "first_layer": 0, "last_layer": 3, "num_heads_kv": 1,
    }  # fmt: skip
    parallel = runner("tp=2,pp=2")
    assert {name: getattr(parallel, name) for name in wanted} == wanted
    assert not hasattr(parallel, "num_headz")


def test_a_folder_of_irc_build_is_an_engine(llama: Llama, tmp_path: Path) -> None:
    words = ["--checkpoint_dir", str(llama.folder), "--output_dir", str(tmp_path / "e")]
    assert main(["build", *words, "--mesh", "tp=2", "--max_batch_size", "2"]) == 0
    assert get_engine_version(tmp_path / "e") == "0.16.0"
    assert read_object(tmp_path / "e" / "config.json")["pretrained_config"]["architecture"]
    runner = ModelRunner.from_dir(tmp_path / "e")
    assert (runner.num_heads, runner.num_layers, runner.max_batch_size) == (2, 3, 2)
    ids = runner.generate([[5, 7, 2]], end_id=-1, pad_id=0, max_new_tokens=4)
    assert ids[0, 0].tolist() == answer(llama, [5, 7, 2], 4)


def test_the_private_runtime_fills_buffers_in_place(engine: Any, llama: Llama) -> None:
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


def test_settings_per_row() -> None:
    config = SamplingConfig(-1, 0, temperature=np.array([0.5, 2.0]), random_seed=[1, 2])
    assert [config.of_row(row).temperature for row in range(2)] == [0.5, 2.0]
    assert config.ends() == () and not hasattr(config, "top_q")
    assert config.update(top_k=5, gather=1) == {"gather": 1} and config.of_row(0).top_k == 5
    assert copy.deepcopy(config).num_return_sequences is None
    same = SamplingConfig(-1, 0, random_seed=2)
    assert config.random(1).random() == same.random(1).random() != config.random(0).random()


ONE = SamplingConfig(1, 0)
# uses of a runner, and the messages
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda r: SamplingConfig(1, 0, temperature=[1, 2]).of_row(2), "temperature has 2 values"),
    (lambda r: SamplingConfig(1, 0, beam_search_diversity_rate=0.5), "ranked by probability"),
    (lambda r: r.generate([[1]], end_id=1, num_beams=0), "beam_width is 0; expected 1 or"),
    (lambda r: r.generate([[1]], end_id=1, max_new_tokens=-1), "max_new_tokens is -1"),
    (lambda r: r.generate([[1]], end_id=1, prompt_table=np.zeros((1, 2, 4))), "no input called p"),
    (lambda r: r.generate([[]], end_id=1), "an empty prompt"),
    (lambda r: r.generate([[1]], temprature=1.0), "no argument 'temprature'; did you mean"),
    (lambda r: r.generate([[1]], end_id=1, temperature=-1.0), "temperature is -1.0; give"),
    (lambda r: r.generate([[1] * 8], end_id=-1, max_new_tokens=40), "caches of this model hold"),
    (lambda r: r.generate([[VOCAB]], end_id=1), "has the token 53, but the model has 53"),
    (lambda r: r.generate([[1], [2.5]], end_id=1), "float64; expected token ids"),
    (lambda r: r.session.decode([[1, 2]], [0], ONE), "lengths of 1 to S"),
    (lambda r: r.session.decode([[1, 2]], [3], ONE), "prompts of these lengths"),
    (lambda r: r.session.decode([[-1]], [1], ONE), "has the token -1, but the"),
    (lambda r: r.session.setup(1, 4, 4, max_attention_window_size=4), "attends to all tokens"),
    (lambda r: r.session.setup(1, 4, 4, sink_token_length=4), "attends to all tokens"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
def test_errors(use: Callable[[Any], Any], message: str, runner: Any) -> None:
    padded = runner("padded")
    padded.session.setup(
        1, 4, 4, 1, max_attention_window_size=8, sink_token_length=0, lora_manager=None,
        lora_uids=None, medusa_choices=None, multi_block_mode=False,
    )  # fmt: skip
    with pytest.raises(Error) as caught:
        use(padded)
    assert re.search(message, caught.value.message)  # not the line of this table


# -- Session


def inputs_of(prompt: list[int]) -> dict[str, np.ndarray]:
    """The inputs of the plain engine for a prompt."""
    count = len(prompt)
    arrays = {
        "input_ids": [prompt], "position_ids": [range(count)], "last_token_ids": [count],
        "attention_mask": [[1] * count],
    }  # fmt: skip
    past = {f"past_key_value_{i}": np.zeros((1, 2, 2, 0, 6), np.float32) for i in range(3)}
    return {name: np.array(array, np.int32) for name, array in arrays.items()} | past


def test_a_session_runs_any_engine_on_arrays(engine: Any, llama: Llama, prompts: Prompts) -> None:
    (prompt, _), session = prompts, Session.from_engine(engine("plain"))
    inputs = inputs_of(prompt)
    infos = session.infer_shapes([TensorInfo(n, x.dtype, x.shape) for n, x in inputs.items()])
    outputs = {info.name: np.empty(info.shape, np.float32) for info in infos}
    assert outputs["present_key_value_0"].shape == (1, 2, 2, len(prompt), 6)
    assert session.run(inputs, outputs)
    wanted = logits(llama, prompt)[-1]
    np.testing.assert_allclose(outputs["logits"][0], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(Error, match="no output 'nothing'"):
        session.run(inputs, {"nothing": np.zeros(1)})
    with pytest.raises(Error, match=r"logits has the shape .*, but the buffer for it \[1, 2\]"):
        session.run(inputs, {"logits": np.zeros((1, 2))})
    with pytest.raises(Error, match="input_ids is float64, but it must be i32"):
        session.run({**inputs, "input_ids": np.array([[1.5, 2]])})


@pytest.mark.parametrize(
    ("count", "change", "message"),
    [
        (3, {"input_ids": np.zeros(3, np.int32)}, r"\[3\], but it must be i32\[batch_size_beam"),
        (3, {"position_ids": np.zeros((1, 2), np.int32)}, "position_ids has the shape"),
        (9, {}, "has input_len=9, but the model was compiled for input_len=1 to 8"),
    ],
)
def test_shapes_that_an_engine_does_not_take(
    count: int, change: dict[str, np.ndarray], message: str, engine: Any
) -> None:
    session = Session.from_engine(engine("plain"))
    for use in (session.set_shapes, session.run):
        with pytest.raises(Error, match=message):
            use(inputs_of([0] * count) | change)


def test_a_session_reports_indices_out_of_range(llama: Llama, tmp_path: Path) -> None:
    irc.compile(llama.folder, tmp_path / "e", backend="reference", outside="error")
    inputs = complete(irc.load(tmp_path / "e").program.ports, {"input_ids": [[1, 2]]})
    inputs["input_ids"][0, 1] = 10**6
    with pytest.raises(Error, match=r"indices from the input input_ids are out of range \(1 of"):
        Session.from_engine(tmp_path / "e").run(inputs)


@pytest.mark.parametrize("backend", ["onnx", "reference"])
def test_results_and_inputs_of_sessions_have_dtypes_of_their_own(
    backend: str, tmp_path: Path
) -> None:
    kinds = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2")
    casts = " ".join(f'%{kind}_y = cast %h {{dtype="{kind}"}} : {kind}[3]' for kind in kinds)
    module = irc.parse(f"""module @m {{ func @forward(%ids: i32[2], %h: bf16[3])
      -> (ids: i32[2], {", ".join(f"{kind}: {kind}[3]" for kind in kinds)}) {{
        {casts} return %ids, {", ".join(f"%{kind}_y" for kind in kinds)} }} }}""")
    irc.compile(module, tmp_path / "engine", backend=backend)
    session = Session.from_engine(tmp_path / "engine")
    x = torch.tensor([0.3, -1.7, 300.0]).bfloat16()
    inputs = {"ids": torch.tensor([5, 6], dtype=torch.int32), "h": x}
    wanted = {"ids": inputs["ids"], "f32": x.float(), "f16": x.half(), "bf16": x}
    wanted |= {"f8e4m3": x.to(torch.float8_e4m3fn), "f8e5m2": x.to(torch.float8_e5m2)}
    for given in (inputs, dict(reversed(inputs.items()))):
        buffers = {name: torch.empty_like(array) for name, array in wanted.items()}
        assert session.run(given, buffers)
        for results in (session.run(given), buffers):
            for name, array in wanted.items():
                assert results[name].dtype == array.dtype
                assert torch.equal(results[name].float(), array.float())


def test_tensors_of_bytes_are_8_bit_floats(tmp_path: Path) -> None:
    """As scripts use them that are older than the dtype of PyTorch."""
    inputs = {"x": irc.Spec("f8e4m3", (2,))}
    model = irc.trace(lambda x: {"y": x.cast("f32").cast("f8e4m3")}, inputs)
    irc.compile(model, tmp_path, backend="reference")
    codes, copied = torch.tensor([0x38, -0x40], dtype=torch.int8), torch.zeros(2, dtype=torch.int8)
    assert Session(tmp_path).run({"x": codes}, {"y": copied}) and codes.tolist() == copied.tolist()
