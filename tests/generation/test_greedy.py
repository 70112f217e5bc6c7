"""Decoding: inputs of every call, when it stops, and what is refused."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import irc
from irc.backends.base import Port, Ports
from irc.errors import Error
from irc.generation.checks import checked
from irc.generation.greedy import greedy
from irc.generation.inputs import cache_range, complete, rounded
from irc.generation.rows import Rows
from irc.ir.dims import symbol

B, S, T, C = map(symbol, "BSTC")
VOCAB = 50
PORTS = Ports(
    (
        Port("input_ids", "i32", (B, S)),
        Port("positions", "i32", (B, S)),
        Port("past_lengths", "i32", (B,)),
        Port("logit_positions", "i32", (B, T)),
    ),
    (Port("k0", "f32", (B, 2, C, 8), True),),
    (Port("logits", "f32", (B, T, VOCAB)),),
)
IMAGE, FIXED = Port("image", "f32", ()), Port("input_ids", "i32", (B, 16))


class Counting:
    """A model that chooses the number after the last token; keeps its inputs."""

    def __init__(self, ports: Ports = PORTS) -> None:
        self.ports = ports
        self.sizes: Mapping[str, int] = {}
        self.steps: list[dict[str, Any]] = []

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise AssertionError("decoding calls step, not run")

    def open(self, sizes: Mapping[str, int]) -> "Counting":
        self.sizes = sizes
        return self

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        self.steps.append({name: array.tolist() for name, array in inputs.items()})
        last = int(inputs["input_ids"][0, -1])
        count = inputs["logit_positions"].shape[1] if "logit_positions" in inputs else 1
        logits = np.zeros((1, count, VOCAB), np.float32)
        logits[:, -1, (last + 1) % VOCAB] = 1
        return {"logits": logits}

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise AssertionError("one row is not moved")

    def clear_rows(self, rows: Sequence[int]) -> None:
        raise AssertionError("rows are used once")


def test_steps_and_their_tokens() -> None:
    program, seen = Counting(), list[int]()
    summary = greedy(program, [3, 4], 2, emit=seen.append)
    assert seen == [5, 6]
    assert (summary.tokens, summary.prompt_tokens, summary.stop) == ((5, 6), 2, "count")
    assert program.sizes == {"B": 1, "C": 64}
    assert program.steps == [
        {
            "input_ids": [[3, 4]],
            "positions": [[0, 1]],
            "past_lengths": [0],
            "logit_positions": [[1]],
        },
        {"input_ids": [[5]], "positions": [[2]], "past_lengths": [2], "logit_positions": [[0]]},
    ]


def test_an_end_stops_and_is_not_emitted() -> None:
    seen: list[int] = []
    summary = greedy(Counting(), [3], 10, ends=[9, 6], emit=seen.append)
    assert (seen, summary.stop) == ([4, 5], "end")
    assert greedy(Counting(), [3], 10, ends=[4]).tokens == ()


def test_the_capacity_of_the_cache() -> None:
    summary = greedy(Counting(), [3, 4], 100, dims={"C": (1, 4, 5)})
    assert summary.tokens == (5, 6, 7, 8), "the last token is not cached"
    assert summary.stop == "capacity"
    program = Counting()
    greedy(program, [3] * 60, 10, dims={"C": (1, 4, 1000)})
    assert program.sizes["C"] == 128
    greedy(program, [3], 10, dims={"C": (80, 80, 1000)})
    assert program.sizes["C"] == 80


def test_a_long_prompt_is_split_over_steps() -> None:
    program = Counting()
    summary = greedy(program, [1, 2, 3, 4, 5], 1, dims={"S": (1, 2, 2)})
    assert summary.tokens == (6,)
    assert [step["input_ids"] for step in program.steps] == [[[1, 2]], [[3, 4]], [[5]]]
    assert [step["past_lengths"] for step in program.steps] == [[0], [2], [4]]


ROPE = """module @m {
  func @f(%x: f32[B, S, 4], %at: i32[B, S]) -> (f32[B, S, 4]) {
    %y = rope %x, %at {head_dim=4, kind="dynamic", original_positions=4} : f32[B, S, 4]
    return %y
  }
}"""


@pytest.mark.parametrize(
    ("old", "new", "padded"),
    [("", "", True), ("ions=4", "ions=5", False), ("dynamic", "linear", False)],
)
def test_padding_of_a_piece_is_at_the_end_of_the_prompt(old: str, new: str, padded: bool) -> None:
    program, module = Counting(), irc.parse(ROPE.replace(old, new))
    prompt, dims = [1, 2, 3, 4, 5], {"S": (1, 2, 3)}
    assert greedy(program, prompt, 1, dims=dims, module=lambda: module).tokens == (6,)
    positions = [step["positions"] for step in program.steps]
    if not padded:
        assert positions == [[[0, 1, 2]], [[3, 4]]]
        return
    assert positions == [[[0, 1, 4]], [[2, 3, 4]], [[4]]]
    assert [step["past_lengths"] for step in program.steps] == [[0], [2], [4]]
    with pytest.raises(Error, match=r"has 5 tokens, but a call takes 1, .* S=min:typ"):
        greedy(program, prompt, 1, dims={"S": (1, 1, 1)}, module=lambda: module)


def test_a_model_may_take_fewer_inputs() -> None:
    ports = dataclasses.replace(PORTS, inputs=PORTS.inputs[:1])
    program = Counting(ports)
    assert greedy(program, [1], 2).tokens == (2, 3)
    assert list(program.steps[0]) == ["input_ids"]


@pytest.mark.parametrize(
    ("change", "prompt", "message"),
    [
        (
            {"inputs": ()},
            [1],
            "not a language model, .* its inputs are none and its outputs logits",
        ),
        ({"states": ()}, [1], "this model is not a language model"),
        ({"outputs": ()}, [1], "this model is not a language model, .* its outputs none"),
        ({"inputs": (*PORTS.inputs, IMAGE)}, [1], "no value for image; use irc run"),
        ({"inputs": (FIXED,)}, [1], "this model takes exactly 16 tokens per call"),
        ({}, [], "the prompt has no tokens"),
        ({}, [50], "the prompt has the token 50, but the model has 50 tokens"),
        ({}, [-1], "the prompt has the token -1, but the model has 50 tokens"),
        ({}, [1.0], "the prompt is float64; expected token ids, which are integers"),
        ({}, [1] * 101, "the prompt has 101 tokens, but the cache of this model holds 100"),
    ],
)
def test_what_cannot_be_done_is_said(change: Any, prompt: list[int], message: str) -> None:
    program = Counting(dataclasses.replace(PORTS, **change))
    with pytest.raises(Error, match=message):
        greedy(program, prompt, 1, dims={"C": (1, 10, 100)})


def test_rates() -> None:
    summary = greedy(Counting(), [1, 2], 5)
    assert summary.prefill_rate == pytest.approx(2 / summary.prefill_seconds)
    assert summary.decode_rate == pytest.approx(4 / summary.decode_seconds)
    assert greedy(Counting(), [1], 1).decode_rate == 0
    assert summary.as_json()["tokens"] == [3, 4, 5, 6, 7]


class ByThrees(Counting):
    """A model whose calls have a multiple of three tokens; ignores those after logit_positions."""

    def __init__(self) -> None:
        ids, positions, *rest = PORTS.inputs
        split = [dataclasses.replace(port, shape=(B, 3 * S)) for port in (ids, positions)]
        super().__init__(dataclasses.replace(PORTS, inputs=(*split, *rest)))

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        assert inputs["input_ids"].shape[1] % 3 == 0
        assert inputs["positions"].shape == inputs["input_ids"].shape
        at = int(inputs["logit_positions"][0, 0])
        return super().step({**inputs, "input_ids": inputs["input_ids"][:, : at + 1]})


def test_calls_are_padded_where_tokens_are_sharded() -> None:
    program, seen = ByThrees(), list[int]()
    summary = greedy(program, [3, 4, 5, 6], 3, emit=seen.append)
    assert seen == [7, 8, 9]
    assert [step["past_lengths"] for step in program.steps] == [[0], [4], [5]]
    assert program.steps[0]["positions"] == [[0, 1, 2, 3, 3, 3]], "padding adds no length"
    # the cache has room for the padding of the last call
    assert greedy(ByThrees(), [1], 99, dims={"C": (1, 8, 8)}).stop == "capacity"
    assert summary.prompt_tokens == 4


class OfAll(Counting):
    """A model whose calls have a multiple of three tokens, with the logits after each of them."""

    def __init__(self) -> None:
        ids = dataclasses.replace(PORTS.inputs[0], shape=(B, 3 * S))
        super().__init__(dataclasses.replace(PORTS, inputs=(ids,)))

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        return {"logits": np.eye(VOCAB, dtype=np.float32)[inputs["input_ids"] + 1]}


def test_logits_of_padding_are_left_out() -> None:
    assert greedy(OfAll(), [3, 4], 3).tokens == (5, 6, 7)


class Choosing(Counting):
    """A model that chooses the next token itself and counts out-of-range tokens."""

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        logits = super().step(inputs)["logits"]
        outside = np.count_nonzero(inputs["input_ids"] >= VOCAB)
        return {
            "next_tokens": logits.argmax(-1).astype(np.int32),
            "input_ids_out_of_range": np.array(outside, np.int32),
        }


def test_a_model_may_choose_the_token() -> None:
    outputs = (Port("next_tokens", "i32", (B, T)), Port("input_ids_out_of_range", "i32", ()))
    ports = dataclasses.replace(PORTS, outputs=outputs)
    assert greedy(Choosing(ports), [3, 4], 3).tokens == (5, 6, 7)
    with pytest.raises(
        Error, match=r"indices from the input input_ids are out of range \(2 of them\)"
    ):
        greedy(Choosing(ports), [3, VOCAB, 4, 99], 3)


# ------------------------------------------------------------------ networks of TensorRT-LLM

VECTORS = ("last_token_ids", "sequence_length", "context_lengths", "host_request_types")
NETWORK = Ports(
    (
        Port("input_ids", "i32", (B, S)),
        Port("position_ids", "i32", (B, S)),
        Port("host_past_key_value_lengths", "i32", (B,)),
        *(Port(name, "i32", (B,)) for name in VECTORS),
        Port("host_max_attention_window_sizes", "i32", (2,)),
        Port("cache_indirection", "i32", (B, 1, C)),
        Port("host_runtime_perf_knobs", "i64", (16,)),
    ),
    (Port("past_key_value_0", "f32", (B, 2, 3, C, 4), True),),
    (Port("logits", "f32", (B, 9)),),
)


class Silent(Counting):
    """A network of TensorRT-LLM that chooses no token."""

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        self.steps.append({name: array.tolist() for name, array in inputs.items()})
        return {"logits": np.zeros((len(inputs["input_ids"]), 9), np.float32)}


def test_the_inputs_of_prompts_and_of_steps() -> None:
    program = Silent(NETWORK)
    rows = Rows(program, {}, [[5, 6, 7], [8]], 16)
    rows.start()
    rows.step([[1], [2]])
    assert program.sizes == {"B": 2, "C": 16}
    first, second = program.steps
    assert first["input_ids"] == [[5, 6, 7], [8, 0, 0]]
    assert first["position_ids"] == [[0, 1, 2], [0, 0, 0]], "padding adds no length"
    assert first["host_past_key_value_lengths"] == [0, 0]
    assert [first[name] for name in VECTORS] == [[3, 1], [3, 1], [3, 1], [0, 0]]
    assert first["host_max_attention_window_sizes"] == [16, 16]
    assert np.shape(first["cache_indirection"]) == (2, 1, 16)
    assert second["position_ids"] == [[3], [1]]
    assert second["host_past_key_value_lengths"] == [3, 1]
    assert [second[name] for name in VECTORS] == [[1, 1], [4, 2], [3, 1], [1, 1]]


# ------------------------------------------------------------------ inputs of any model

CACHES = (Port("k0", "f32", (B, 2, C, 8), True), Port("v0", "bf16", (B, 2, C, 4), True))
LANGUAGE = dataclasses.replace(PORTS, states=CACHES)
PLAIN = Ports((Port("x", "f32", (B,)), Port("n", "i32", (B,))), (), ())


def test_ids_alone_are_enough() -> None:
    found = complete(LANGUAGE, {"input_ids": np.array([[1, 2, 3], [4, 5, 6]])})
    assert list(found) == ["input_ids", "positions", "past_lengths", "logit_positions", "k0", "v0"]
    assert found["input_ids"].dtype == np.int32
    assert found["positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert found["past_lengths"].tolist() == [0, 0]
    assert found["logit_positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert found["k0"].shape == (2, 2, 64, 8)
    assert found["v0"].shape == (2, 2, 64, 4)
    assert found["v0"].dtype == ml_dtypes.bfloat16
    assert all(found[name].dtype == np.int32 for name in list(found)[:4])
    assert not found["k0"].any()


def test_provided_inputs_are_kept() -> None:
    given = {
        "input_ids": np.array([[7]]),
        "past_lengths": np.array([5]),
        "logit_positions": np.array([[0]]),
        "k0": np.ones((1, 2, 9, 8), np.float32),
        "v0": np.ones((1, 2, 9, 4), np.float32),
    }
    found = complete(LANGUAGE, given)
    assert found["positions"].tolist() == [[5]]
    assert found["past_lengths"].tolist() == [5]
    assert found["k0"].shape == (1, 2, 9, 8)


def test_wrong_past_lengths_are_refused() -> None:
    with pytest.raises(Error, match="past_lengths is not 0, so the caches are required"):
        complete(LANGUAGE, {"input_ids": np.array([[7]]), "past_lengths": np.array([5])})
    message = re.escape("past_lengths has the shape [2], but it must be [1]")
    with pytest.raises(Error, match=message):
        complete(LANGUAGE, {"input_ids": np.array([[7]]), "past_lengths": np.array([0, 0])})


def test_more_tokens_than_the_cache_holds_are_refused() -> None:
    assert complete(LANGUAGE, {"input_ids": np.zeros((1, 20), int)}, (1, 20))["k0"].shape[2] == 20
    assert complete(LANGUAGE, {"input_ids": [[7]]}, (80, 96))["k0"].shape[2] == 80
    with pytest.raises(Error, match="has 21 tokens per row, but the cache of this model holds 20"):
        complete(LANGUAGE, {"input_ids": np.zeros((1, 21), int)}, (1, 20))


def test_unknown_and_missing_inputs_are_named() -> None:
    x, n = np.zeros(2, np.float32), np.zeros(2, np.int32)
    with pytest.raises(Error, match=r"no input 'xx'; did you mean 'x'\?; it has x, n"):
        complete(PLAIN, {"xx": x, "n": n})
    with pytest.raises(Error, match="the inputs lack n; the model takes x, n"):
        complete(PLAIN, {"x": x})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("x", kind) for kind in (np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8)],
        *[("n", kind) for kind in (np.int64, np.uint8, np.int16)],
    ],
)
def test_numbers_are_converted(name: str, kind: type) -> None:
    given = {"x": np.zeros(2, np.float32), "n": np.zeros(2, np.int32)}
    found = complete(PLAIN, given | {name: np.array([1, 2], kind)})[name]
    assert found.dtype == given[name].dtype
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", np.array([1.5, 2]), "the input n is float64, but it must be i32; convert it"),
        ("n", np.array([2**40, 0]), "the input n has numbers outside the range of i32"),
        ("x", np.array([True, False]), "the input x is bool, but it must be f32"),
        ("x", np.array(["a", "b"]), "the input x is <U1, but it must be f32"),
    ],
)
def test_other_conversions_are_refused(name: str, value: np.ndarray, message: str) -> None:
    given = {"x": np.zeros(2, np.float32), "n": np.zeros(2, np.int32)} | {name: value}
    with pytest.raises(Error, match=message):
        complete(PLAIN, given)


def test_the_capacity_of_caches() -> None:
    assert cache_range(Ports((), CACHES, ()), {"C": [1, 8, 100]}) == (1, 100)
    assert cache_range(Ports((), CACHES, ()), {}) == (0, 0)
    assert cache_range(Ports((), (Port("k", "f32", (1, 2, 32, 8), True),), ()), {}) == (32, 32)
    assert [rounded(count, (0, 0)) for count in (1, 64, 65)] == [64, 64, 128]
    assert (rounded(65, (1, 100)), rounded(1, (80, 96))) == (100, 80)


@pytest.mark.parametrize("ids", [[1, 2, 3], [[[1]]], [[], []], np.zeros((0, 3), int)])
def test_ids_are_rows_of_tokens(ids: object) -> None:
    with pytest.raises(Error, match=r"input_ids has the shape .*, but it must be \[B, S\]"):
        complete(LANGUAGE, {"input_ids": np.asarray(ids, np.int64)})


@pytest.mark.parametrize("place", [-1, 3])
def test_logit_positions_are_positions_of_tokens(place: int) -> None:
    with pytest.raises(Error, match="logit_positions must lie between 0 and 2"):
        complete(LANGUAGE, {"input_ids": [[1, 2, 3]], "logit_positions": [[place]]})


# ------------------------------------------------------------------ results that count


def counts(**numbers: Any) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.int32) for name, number in numbers.items()}


def test_counts_of_zero_are_removed() -> None:
    zeros = counts(ids_out_of_range=0, keys_out_of_range=0, capacity_overflow=0)
    assert list(checked({"y": np.ones(3), **zeros}, ["ids", "keys"])) == ["y"]


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("keys_out_of_range", 1, r"indices from the input keys are out of range \(1 of them\)"),
        (
            "computed_ids_out_of_range",
            7,
            r"indices from several inputs are out of range \(7 of them\)",
        ),
        ("capacity_overflow", 3, "need a capacity of 3; compile with capacity=3"),
    ],
)
def test_counts_are_errors(name: str, number: int, message: str) -> None:
    with pytest.raises(Error, match=message):
        checked(counts(**{name: number}), ["keys"])


def test_results_of_the_model_with_such_names_stay() -> None:
    own = {
        **counts(light_out_of_range=4),
        "keys_out_of_range": np.ones((2, 3), np.int32),
        "capacity_overflow": np.array(1.5, np.float32),
    }
    assert list(checked(own, ["keys"])) == list(own)
