"""The inputs that Rows gives a network of TensorRT-LLM, by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from irc.backends.base import Port, Ports
from irc.generation.rows import Rows
from irc.ir.dims import symbol

B, S, C = map(symbol, "BSC")
VECTORS = ("last_token_ids", "sequence_length", "context_lengths", "host_request_types")
PORTS = Ports(
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


class Recorder:
    """A program that keeps its inputs."""

    ports = PORTS

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.sizes: Mapping[str, int] = {}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise AssertionError("rows that do not move use a stream")

    def open(self, sizes: Mapping[str, int]) -> "Recorder":
        self.sizes = sizes
        return self

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.steps.append({name: array.tolist() for name, array in inputs.items()})
        return {"logits": np.zeros((len(inputs["input_ids"]), 9), np.float32)}


def test_the_inputs_of_prompts_and_of_steps() -> None:
    program = Recorder()
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
