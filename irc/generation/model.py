"""`Model`: a loaded program that takes incomplete inputs, or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ..argument_checks import check_arrays, check_count, check_kind
from ..backends.base import Program
from ..ir.core import Module
from .checks import checked
from .decoding import Criteria, Decoding, Processor
from .greedy import Summary, greedy
from .inputs import Arrays, cache_range, check_ranges, complete
from .sampling import GREEDY, Sampling, Words, random_of_row
from .search import Beams, DecodingRules, Hypothesis, Sampled
from .tokenizer import TextStream, Tokenizer


class Model:
    """A program, the ranges of its dims, the end tokens, and the folder of its tokenizer.

    `module` gives the module of the program, see `greedy`.
    """

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, Sequence[int]],
        folder: Path,
        ends: Sequence[int] = (),
        module: Callable[[], Module] | None = None,
    ) -> None:
        self.module = module
        self.program, self.dims, self.folder, self.ends = program, dims, folder, tuple(ends)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder; an Error if there is none."""
        return Tokenizer(self.folder)

    def run(self, inputs: Mapping[str, object]) -> Arrays:
        """The outputs by name. Absent inputs of a language model get defaults (see `complete`).

        States are returned only if `inputs` has states.
        """
        check_arrays(inputs)
        ports = self.program.ports
        arrays = complete(ports, inputs, cache_range(ports.states, self.dims))
        given = [port for port in ports.states if port.name in inputs]
        check_ranges([*ports.inputs, *given], arrays, self.dims)
        results = checked(self.program.run(arrays), arrays)
        outputs = {port.name for port in ports.outputs}
        if any(state.name in inputs for state in ports.states):
            return results
        return {name: array for name, array in results.items() if name in outputs}

    def generate_ids(
        self, prompt: Sequence[int], most: int, emit: Callable[[int], None] = lambda token: None
    ) -> Summary:
        """Continue token ids greedily by up to `most`; `emit` is called with each new token."""
        return greedy(self.program, prompt, most, self.ends, self.dims, emit, self.module)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        beams: int = 1,
        length_penalty: float = 1.0,
        stop: Words = (),
        bad: Words = (),
        seed: int = 0,
        extra: Mapping[str, object] | None = None,
        processor: Processor | None = None,
        criteria: Criteria | None = None,
    ) -> list[list[Hypothesis]]:
        """Continue prompts of token ids by sampling, or by a search with several `beams`.

        Returns the sequences of each prompt, best first, prompt and end tokens included, with the
        log-probabilities of their new tokens. A sequence of `stop` ends a continuation, one of
        `bad` never occurs. `extra` are other inputs of the program by name, such as the results of
        an encoder for these prompts; names that it does not have are ignored. `processor` changes
        logits, `criteria` ends decoding, see `decoding`.
        """
        check_count("max_new_tokens", max_new_tokens)
        rules = DecodingRules(sampling, max_new_tokens, self.ends, stop, bad)
        searches = [
            Beams(prompt, rules, beams, length_penalty)
            if beams > 1
            else Sampled(prompt, rules, random_of_row(seed, row))
            for row, prompt in enumerate(prompts)
        ]
        arrays = {name: np.asarray(value) for name, value in (extra or {}).items()}
        decoding = Decoding(
            self.program, self.dims, searches, arrays, processor=processor, criteria=criteria
        )
        for _ in decoding.steps():
            pass
        return decoding.results

    def generate_text(
        self, prompt: Sequence[int], most: int, emit: Callable[[str], None]
    ) -> Summary:
        """`generate_ids` as text; `emit` is called with text that can no longer change."""
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
        check_kind("the prompt", prompt, str, "text (Model.generate_ids takes token ids)")
        check_count("max_new_tokens", max_new_tokens)
        pieces: list[str] = []
        self.generate_text(self.tokenizer.encode(prompt), max_new_tokens, pieces.append)
        return "".join(pieces)
