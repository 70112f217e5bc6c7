"""Sessions and runners of TensorRT-LLM over artifacts: tokens, beams, stop words, streams."""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

import copy
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.cli.main import main
from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.runtime import (
    GenerationSession,
    ModelConfig,
    ModelRunner,
    SamplingConfig,
)
from irc.generation.sampling import log_probabilities
from tests.fresh import fresh, session_seed
from tests.frontends.tensorrt_llm.decoders import HIDDEN, VOCAB, Oracle, artifact

SEED = session_seed()
KINDS = ("own", "fixed", "growing")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(SEED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: artifact(kind, SEED, tmp_path_factory.mktemp(kind) / "engine"))


@pytest.fixture
def runner(folders: Callable[[str], Path]) -> ModelRunner:
    return ModelRunner.from_dir(folders("fixed"))


@pytest.fixture(scope="module")
def batch(oracle: Oracle) -> list[list[int]]:
    return oracle.prompts(fresh(1), 3)


@pytest.fixture
def prompt(batch: list[list[int]]) -> list[int]:
    return batch[0]


def new(row: np.ndarray, prompt: list[int]) -> list[int]:
    return row[len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_every_signature(
    kind: str,
    folders: Callable[[str], Path],
    oracle: Oracle,
    batch: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = ModelRunner.from_dir(folders(kind)).generate(batch, end_id=-1, max_new_tokens=5)
    assert ids.shape == (len(batch), 1, max(map(len, batch)) + 5)
    for row, prompt in zip(ids[:, 0], batch, strict=True):
        assert row[: len(prompt) + 5].tolist() == oracle.greedy(prompt, 5)
        words = ["--prompt", " ".join(map(str, prompt)), "--raw-ids", "--max-new-tokens", "5"]
        assert main(["generate", str(folders(kind)), *words]) == 0
        assert [*map(int, capsys.readouterr().out.split())] == new(row, prompt)[:5]


def test_onnx_and_padded_rows(tmp_path: Path, oracle: Oracle, batch: list[list[int]]) -> None:
    session = GenerationSession(None, artifact("fixed", SEED, tmp_path / "engine", "onnx"))
    lengths = [len(prompt) for prompt in batch]
    padded = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in batch], np.int32)
    session.setup(len(batch), max(lengths), 3)
    ids = session.decode(padded, lengths, SamplingConfig(end_id=-1, pad_id=VOCAB))
    for row, prompt in zip(ids[:, 0].tolist(), batch, strict=True):
        assert row[: len(prompt) + 3] == oracle.greedy(prompt, 3)


def test_padding_within_a_prompt_is_refused(folders: Callable[[str], Path]) -> None:
    session = GenerationSession(None, folders("growing"))
    session.setup(1, 3, 1)
    with pytest.raises(Error, match="a prompt has the token 4, which is pad_id"):
        session.decode(np.array([[1, 2, 4]]), [3], SamplingConfig(end_id=-1, pad_id=4))


def sums_by_hand(oracle: Oracle, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The log-probabilities of all continuations of two tokens."""
    first = log_probabilities(oracle.logits(prompt))
    seconds = [log_probabilities(oracle.logits([*prompt, token])) for token in range(VOCAB)]
    pairs = product(range(VOCAB), repeat=2)
    return {(one, two): float(first[one] + seconds[one][two]) for one, two in pairs}


@pytest.mark.parametrize("kind", KINDS)
def test_beams_as_wide_as_the_vocabulary_find_the_best_sequences(
    kind: str, folders: Callable[[str], Path], oracle: Oracle, prompt: list[int]
) -> None:
    found = ModelRunner.from_dir(folders(kind)).generate(
        [prompt], end_id=-1, max_new_tokens=2, num_beams=VOCAB, **REPORT
    )
    sums, totals = found["cum_log_probs"][0], sums_by_hand(oracle, prompt)
    best = sorted(totals.values(), reverse=True)[:VOCAB]
    np.testing.assert_allclose(sums, best, rtol=1e-4, atol=1e-5)
    of_rows = [totals[tuple(new(row, prompt)[:2])] for row in found["output_ids"][0]]
    np.testing.assert_allclose(sums, of_rows, rtol=1e-4, atol=1e-5)


REPORT: dict[str, Any] = {
    "return_dict": True,
    "output_sequence_lengths": True,
    "output_cum_log_probs": True,
    "output_log_probs": True,
}


@pytest.mark.parametrize(
    ("version", "sampling", "model"),
    [
        ("0.5", (3, 0, 4, 0.5), (90, 2, 3, 3, 12, False)),
        ("0.9", (3, 0, 20, 4), (8, 4, 90, 2, 3, 3, 12, False)),
    ],
)
def test_settings_by_position(version: str, sampling: Any, model: Any) -> None:
    with new_session(version):
        config, sizes = SamplingConfig(*sampling), ModelConfig(*model, dtype="float16")
        assert (config.ends(), config.num_beams, sizes.vocab_size) == ((3,), 4, 90)
        assert config.temperature == (0.5 if version == "0.5" else 1.0)
        assert (sizes.dtype, sizes.tokens_per_block, int(sizes.quant_mode)) == ("float16", 64, 0)
        assert config.update(top_k=5, gather=1) == {"gather": 1}
        assert config.of_row(0).top_k == 5


def test_settings_per_row() -> None:
    config = SamplingConfig(-1, 0, temperature=np.array([0.5, 2.0]), random_seed=[1, 2])
    assert [config.of_row(row).temperature for row in range(2)] == [0.5, 2.0]
    assert config.ends() == () and not hasattr(config, "top_q")
    assert copy.deepcopy(config).num_return_sequences is None
    same = SamplingConfig(-1, 0, random_seed=2)
    assert config.random(1).random() == same.random(1).random() != config.random(0).random()


def test_a_sampled_token_is_as_likely_as_the_model_says(
    runner: ModelRunner, oracle: Oracle, prompt: list[int]
) -> None:
    config = SamplingConfig(-1, 0, top_k=4, top_p=0.9, temperature=1.5, random_seed=SEED)
    draws, again = (
        runner.generate([prompt] * 16, sampling_config=config, max_new_tokens=1)[:, 0, len(prompt)]
        for _ in range(2)
    )
    assert draws.tolist() == again.tolist()
    logits = oracle.logits(prompt) / 1.5
    order = np.argsort(-logits)[:4]
    chances = np.exp(log_probabilities(logits[order]))
    kept = order[(np.cumsum(chances) - chances) < 0.9]
    assert set(draws.tolist()) <= set(kept.tolist())


def test_the_end_token_stops_a_row(runner: ModelRunner, oracle: Oracle, prompt: list[int]) -> None:
    answer = oracle.greedy(prompt, 6)[len(prompt) :]
    end = answer[2]
    found = runner.generate([prompt], end_id=end, max_new_tokens=6, **REPORT)
    count = answer.index(end) + 1
    assert found["sequence_lengths"].tolist() == [[len(prompt) + count]]
    assert new(found["output_ids"][0, 0], prompt) == answer[:count] + [end] * (6 - count)
    assert (found["log_probs"][0, 0] != 0).sum() == count


def test_streaming_gives_one_result_per_token(
    runner: ModelRunner, oracle: Oracle, prompt: list[int]
) -> None:
    wanted = oracle.greedy(prompt, 4)
    found: Iterator[Any] = runner.generate([prompt], end_id=-1, max_new_tokens=4, streaming=True)
    for count in range(1, 5):
        ids = next(found)
        assert ids[0, 0, : len(prompt) + count].tolist() == wanted[: len(prompt) + count]
    assert next(found, None) is None


def test_an_argument_of_decode_holds_for_one_call(
    runner: ModelRunner, oracle: Oracle, prompt: list[int]
) -> None:
    config, session = SamplingConfig(-1, 0), runner.session
    session.setup(1, len(prompt), 5)
    once = session.decode([prompt], [len(prompt)], config, no_repeat_ngram_size=1)
    tokens = once[0, 0].tolist()
    assert len({*tokens[len(prompt) :]}) == 5 and not {*tokens[len(prompt) :]} & {*prompt}
    again = session.decode([prompt], [len(prompt)], config)
    assert again[0, 0].tolist() == oracle.greedy(prompt, 5)


def test_hooks_see_and_change_the_tokens(runner: ModelRunner, prompt: list[int]) -> None:
    seen = list[int]()

    def processor(step: int, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        seen.append(step)
        logits = logits.copy()
        logits[:, (step * 5 + 1) % VOCAB] = 1e4
        return logits

    ids = runner.generate(
        [prompt],
        end_id=-1,
        max_new_tokens=5,
        logits_processor=processor,
        stopping_criteria=lambda step, ids, logits: step == 2,
    )
    assert seen == [0, 1, 2]
    assert new(ids[0, 0], prompt)[:3] == [1, 6, 11]


def test_the_rows_of_a_prompt_table_have_ids_behind_the_vocabulary(tmp_path: Path) -> None:
    runner = ModelRunner.from_dir(artifact("fixed", SEED, tmp_path / "e", tuned=True))
    table = fresh(2).standard_normal((1, 2, HIDDEN), np.float32)
    settings: dict[str, Any] = {"end_id": -1, "max_new_tokens": 1, "prompt_table": table}
    ids = runner.generate([[VOCAB, VOCAB + 1, 3]], **settings)
    assert ids[0, 0, :3].tolist() == [VOCAB, VOCAB + 1, 3] and 0 <= ids[0, 0, 3] < VOCAB
    with pytest.raises(Error, match="has the token 25, but the model has 25 tokens"):
        runner.generate([[VOCAB + 2]], **settings)


def test_a_model_without_caches_predicts_one_token(tmp_path: Path, oracle: Oracle) -> None:
    runner = ModelRunner.from_dir(artifact("none", SEED, tmp_path / "e"))
    ids = runner.generate([[3, 1, 4]], end_id=-1, max_new_tokens=1)
    assert ids[0, 0].tolist() == oracle.greedy([3, 1, 4], 1) and not runner.use_kv_cache
    with pytest.raises(Error, match=r"this model is no language model, which has .* caches"):
        runner.generate([[3, 1, 4]], end_id=-1, max_new_tokens=2)


@pytest.mark.parametrize("beams", [1, 3])
def test_inputs_that_the_caller_gives(beams: int, tmp_path: Path, batch: list[list[int]]) -> None:
    bias = np.zeros((3, VOCAB), np.float32)
    bias[np.arange(3), (wanted := [4, 9, 2])] = 1e4  # which is the likeliest token of every beam
    session = GenerationSession(None, artifact("fixed", SEED, tmp_path / "e", biased=True))
    session.setup(3, 6, 2, beams)
    config = SamplingConfig(-1, 0, num_beams=beams)
    ids = session.decode_batch(list(map(np.array, batch)), config, inputs={"bias": bias})
    assert [new(row, prompt)[:2] for row, prompt in zip(ids[:, 0], batch, strict=True)] == [
        [token, token] for token in wanted
    ]
    with pytest.raises(Error, match="no value for bias; use irc run, or give arrays by name"):
        session.decode_batch(list(map(np.array, batch)), config)


def test_prompts_of_one_length_without_a_mask(tmp_path: Path, oracle: Oracle) -> None:
    runner = ModelRunner.from_dir(artifact("growing", SEED, tmp_path / "e", unmasked=True))
    batch = [[3, 1, 4], [1, 5, 9]]
    ids = runner.generate(batch, end_id=-1, max_new_tokens=4)
    assert ids[:, 0].tolist() == [oracle.greedy(prompt, 4) for prompt in batch]
    with pytest.raises(Error, match=r"no attention_mask, which tells padding.* found 2, 3"):
        runner.generate([[1, 2], [1, 2, 3]], end_id=-1)


REFUSED: list[tuple[Callable[[ModelRunner], Any], str]] = [
    (lambda r: SamplingConfig(1, 0, top_q=3), "no argument 'top_q'; did you mean 'top_p'"),
    (lambda r: SamplingConfig(1, 0, temperature=[1, 2]).of_row(2), "temperature has 2 values"),
    (lambda r: SamplingConfig(1, 0, beam_search_diversity_rate=0.5), "ranked by probability"),
    (lambda r: r.generate([[1]], end_id=1, num_beams=0), "beam_width is 0; expected 1 or"),
    (lambda r: r.generate([[1]], end_id=1, max_new_tokens=-1), "max_new_tokens is -1"),
    (
        lambda r: r.generate([[1]], end_id=1, prompt_table=np.zeros((1, 2, 4))),
        "no input called pro",
    ),
    (lambda r: r.generate([[]], end_id=1), "an empty prompt"),
    (lambda r: r.generate([[1]], end_id=1, max_tokens=3), "no argument 'max_tokens'"),
    (lambda r: r.generate([[1]], temprature=1.0), "no argument 'temprature'; did you mean"),
    (lambda r: r.generate([[1]], end_id=1, temperature=-1.0), "temperature is -1.0; expected"),
    (lambda r: r.generate([[1]], end_id=1, lora_uids=["0"]), "merge the adapters"),
    (lambda r: r.generate([[1]], encoder_input_ids=[[1]]), "run the encoder with"),
    (lambda r: r.generate([[1] * 30], end_id=1, max_new_tokens=9), "caches of this model hold"),
    (lambda r: r.generate([[VOCAB]], end_id=1), "has the token 23, but the model has 23"),
    (lambda r: r.generate([[1], [2.5]], end_id=1), "float64; expected token ids"),
    (lambda r: r.session.decode([[1, 2]], [0], SamplingConfig(1, 0)), "lengths of 1 to S"),
    (lambda r: r.session.decode([[1, 2]], [3], SamplingConfig(1, 0)), "prompts of these lengths"),
    (lambda r: r.session.decode([[-1]], [1], SamplingConfig(1, 0)), "has the token -1, but the"),
    (lambda r: r.session.setup(1, 4, 4, max_attention_window_size=4), "attends to all tokens"),
    (lambda r: r.session.setup(1, 4, 4, sink_token_length=4), "attends to all tokens"),
    (lambda r: r.session.setup(1, 4, 4, lora_manager=object()), "merge the adapters"),
    (lambda r: r.session.setup(1, 4, 4, medusa_choices=[[0]]), "speculative decoding"),
    (lambda r: r.session.setup(1, 4, 4, max_new_tokenz=4), "no argument 'max_new_tokenz'; did"),
    (lambda r: GenerationSession(None, r.artifact, debug_mode=True), "irc run --backend reference"),
    (lambda r: ModelRunner.from_dir("x", debug_mode=True), "irc run --backend reference"),
    (lambda r: ModelRunner.from_dir("x", max_batch_sise=3), "no argument 'max_batch_sise'; did"),
    (lambda r: ModelRunner.from_dir("x", lora_dir=["a"]), "merge the adapters"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
def test_errors(use: Callable[[ModelRunner], Any], message: str, runner: ModelRunner) -> None:
    runner.session.setup(
        1, 4, 4, 1, max_attention_window_size=8, sink_token_length=0, lora_manager=None,
        lora_uids=None, medusa_choices=None, multi_block_mode=False,
    )  # fmt: skip
    with pytest.raises(Error) as caught:
        use(runner)
    assert re.search(message, caught.value.message)  # not the line of this table
