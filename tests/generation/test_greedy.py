"""Greedy decoding: inputs of every step, and when it stops."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import Port, Ports
from irc.errors import Error
from irc.generation.greedy import greedy
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

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.steps.append({name: array.tolist() for name, array in inputs.items()})
        last = int(inputs["input_ids"][0, -1])
        count = inputs["logit_positions"].shape[1] if "logit_positions" in inputs else 1
        logits = np.zeros((1, count, VOCAB), np.float32)
        logits[:, -1, (last + 1) % VOCAB] = 1
        return {"logits": logits}


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
        ({"inputs": ()}, [1], "no language model, .* its inputs are none and its outputs logits"),
        ({"states": ()}, [1], "this model is no language model"),
        ({"outputs": ()}, [1], "this model is no language model, .* its outputs none"),
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

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"logits": np.eye(VOCAB, dtype=np.float32)[inputs["input_ids"] + 1]}


def test_logits_of_padding_are_left_out() -> None:
    assert greedy(OfAll(), [3, 4], 3).tokens == (5, 6, 7)


class Choosing(Counting):
    """A model that chooses the next token itself and counts out-of-range tokens."""

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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
