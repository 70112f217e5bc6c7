"""A loaded program with what is known about it: complete inputs, text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from ..backends.base import Program
from ..given import check_arrays, check_count, check_kind
from .checks import checked
from .greedy import Summary, greedy
from .inputs import Arrays, cache_capacity, complete
from .tokenizer import TextStream, Tokenizer


class Model:
    """A program, the ranges of its dims, the tokens that end a text, and its tokenizer's folder."""

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, Sequence[int]],
        folder: Path,
        ends: Sequence[int] = (),
    ) -> None:
        self.program, self.dims, self.folder, self.ends = program, dims, folder, tuple(ends)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder; an Error where there is none."""
        return Tokenizer(self.folder)

    def run(self, inputs: Mapping[str, object]) -> Arrays:
        """The outputs by name. Absent inputs of a language model are filled in (see `complete`).

        States come back only where they were given.
        """
        check_arrays(inputs)
        ports = self.program.ports
        capacity = cache_capacity(ports.states, self.dims)
        given = complete(ports, inputs, capacity)
        results = checked(self.program, self.program.run(given), given)
        outputs = {port.name for port in ports.outputs}
        if any(state.name in inputs for state in ports.states):
            return results
        return {name: array for name, array in results.items() if name in outputs}

    def generate_ids(
        self, prompt: Sequence[int], most: int, emit: Callable[[int], None] = lambda token: None
    ) -> Summary:
        """Continue token ids greedily by up to `most`; `emit` gets each as it is chosen."""
        return greedy(self.program, prompt, most, self.ends, self.dims, emit)

    def generate_text(
        self, prompt: Sequence[int], most: int, emit: Callable[[str], None]
    ) -> Summary:
        """The same; `emit` gets text as it becomes certain."""
        stream = TextStream(self.tokenizer, prompt)

        def forward(token: int) -> None:
            if text := stream.add(token):
                emit(text)

        summary = self.generate_ids(prompt, most, forward)
        if rest := stream.finish():
            emit(rest)
        return summary

    def generate(self, prompt: str, max_new_tokens: int = 100) -> str:
        """The text that follows `prompt`."""
        check_kind("the prompt", prompt, str, "text (of token ids, Model.generate_ids goes on)")
        check_count("max_new_tokens", max_new_tokens)
        pieces: list[str] = []
        self.generate_text(self.tokenizer.encode(prompt), max_new_tokens, pieces.append)
        return "".join(pieces)
