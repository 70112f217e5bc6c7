"""Runs a language model of a checkpoint folder on a backend, as prefill and decode steps."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import irc
import irc.passes
from irc import backends
from irc.backends.base import Program
from irc.driver.load import Artifact
from irc.generation.greedy import greedy
from irc.generation.rows import Rows
from irc.pipeline import run_pipeline
from tests.fresh import fresh

CAPACITY = 96


def program(module: irc.Module, backend: str, folder: Path) -> Program:
    """The module compiled by the backend's own pipeline and loaded."""
    found = backends.get(backend)
    run_pipeline(module, found.default_pipeline)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = found.emit(module, folder, base=Path.cwd()).facts
    return found.load(folder, manifest)


def continued(artifact: Artifact, prompt: Sequence[int], most: int) -> list[int]:
    """The most likely tokens after a prompt, without an end token."""
    model = artifact.model
    summary = greedy(model.program, prompt, most, model.ends, model.dims, module=model.module)
    return list(summary.tokens)


class Runner:
    """One conversation per row: a stream with its KV caches."""

    def __init__(self, program: Program, rows: int, capacity: int = CAPACITY) -> None:
        self.stream = program.open({"B": rows, "C": capacity})
        self.names = {port.name for port in program.ports.inputs}
        self.past = np.zeros(rows, np.int32)

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Logits f32 [rows, tokens, vocab] of the tokens of this call."""
        rows, tokens = ids.shape
        inputs: Mapping[str, Any] = {
            "input_ids": ids.astype(np.int32),
            "positions": self.past[:, None] + np.arange(tokens, dtype=np.int32),
            "past_lengths": self.past,
            "lengths": np.full(rows, tokens, np.int32),
            "logit_positions": np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
        }
        self.past = self.past + np.int32(tokens)
        used = {name: array for name, array in inputs.items() if name in self.names}
        return self.stream.step(used)["logits"]

    def decode(self, prompt: np.ndarray, forced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits of the prompt, and of every forced token after it."""
        prefill = self.step(prompt)
        steps = [self.step(forced[:, i : i + 1]) for i in range(forced.shape[1])]
        return prefill, np.concatenate(steps, axis=1)

    def greedy(self, prompt: np.ndarray, count: int) -> np.ndarray:
        """The `count` most likely tokens, one after the other."""
        logits = self.step(prompt)
        tokens: list[np.ndarray] = []
        for _ in range(count):
            tokens.append(np.argmax(logits[:, -1:], axis=-1))
            logits = self.step(tokens[-1])
        return np.concatenate(tokens, axis=1)


def talks(rows: Rows, tokens: int) -> Iterator[tuple[np.ndarray, list[list[int]]]]:
    """The logits [n, V] after n texts, and the texts, of four rows that are fed, moved and cleared.

    The model has so many `tokens`; a row gets up to 26.
    """
    rng, texts = fresh(), [list[int]()] * 4

    def step(counts: list[int], first: int = 0) -> tuple[np.ndarray, list[list[int]]]:
        new = [rng.integers(1, tokens, count).tolist() for count in counts]
        end = first + len(new)
        texts[first:end] = [
            [*text, *more] for text, more in zip(texts[first:end], new, strict=True)
        ]
        return rows.feed(new, first), texts[first:end]

    def copy(sources: list[int], targets: list[int]) -> None:
        rows.copy(sources, targets)
        for target, text in zip(targets, [texts[source] for source in sources], strict=True):
            texts[target] = text

    yield step([3, 9, 20, 13])
    yield step([1, 1, 1, 1])
    copy([3], [0])  # the first text has ended
    rows.clear([3])
    texts[3] = []
    yield step([1, 1, 1])
    yield step([11], first=3)
    copy([1, 3, 1], [3, 1, 2])
    yield step([1, 1, 1, 1])
    yield step([2, 1], first=1)
    yield step([1, 1], first=1)
    assert rows.past.tolist() == [len(text) for text in texts]


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest expected number."""
    assert got.shape == wanted.shape
    return float(np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max())
