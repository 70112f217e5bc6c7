"""`Model`: a loaded program that takes incomplete inputs, or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ..argument_checks import check_arrays, check_kind
from ..backends.base import Program
from ..errors import Error
from ..ir.core import Module
from .chat import ChatTemplate
from .checkpoint_settings import CheckpointSettings
from .checks import checked
from .decoding import Criteria, Decoding, Processor, entries, most_rows, room
from .inputs import Arrays, cache_range, check_ranges, complete
from .rules import DecodingRules
from .sampling import random_of_row
from .search import Beams, Completion, Sampled
from .settings import GenerationSettings
from .speculation import drafter_of
from .tokenizer import TOKENIZER, TextStream, Tokenizer

Emit: TypeAlias = Callable[[int, int, str], object]


class Model:
    """A program, the ranges of its dims, the end tokens, and the folder of its tokenizer.

    `module` gives the module of the program, whose rope may depend on the length of a prompt.
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

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template in the folder; None if there is none."""
        return ChatTemplate.of_folder(self.folder)

    @cached_property
    def checkpoint(self) -> CheckpointSettings:
        """What the generation_config.json in the folder says."""
        return CheckpointSettings.of_folder(self.folder)

    @property
    def defaults(self) -> GenerationSettings:
        """The settings of the checkpoint, which hold where a user says nothing else."""
        return self.checkpoint.defaults

    def run(self, inputs: Mapping[str, object]) -> Arrays:
        """The outputs by name. Absent inputs of a language model get defaults (see `complete`).

        States are returned only if `inputs` has states.
        """
        check_arrays(inputs)
        ports = self.program.ports
        arrays = complete(ports, inputs, cache_range(ports, self.dims))
        given = [port for port in ports.states if port.name in inputs]
        check_ranges([*ports.inputs, *given], arrays, self.dims)
        results = checked(self.program.run(arrays), arrays)
        outputs = {port.name for port in ports.outputs}
        if any(state.name in inputs for state in ports.states):
            return results
        return {name: array for name, array in results.items() if name in outputs}

    def search(
        self, prompt_ids: Sequence[int], settings: GenerationSettings, row: int = 0
    ) -> Sampled | Beams:
        """How one prompt is continued. Rows of one seed have different random numbers.

        Text ends where the caches are full, if not before.
        """
        count, constraint, checkpoint = len(prompt_ids), None, self.checkpoint
        limit = min(settings.limit(count), room(self.program.ports, self.dims, count))
        has_tokenizer = settings.stop or (self.folder / TOKENIZER).is_file()
        tokenizer = self.tokenizer if has_tokenizer else None
        bad = _token_words(settings.bad_words, self.tokenizer) if settings.bad_words else ()
        if settings.json_schema or settings.regex or settings.grammar:
            from .constraints import constraint_of

            constraint = constraint_of(settings, self.tokenizer, self.ends)
            # which says what begins and ends the text
            checkpoint = replace(checkpoint, forced_bos_token_id=None, forced_eos_token_ids=())
        rules = DecodingRules(
            settings, limit, self.ends, (), bad, checkpoint, constraint, scored=False
        )
        stop, special = settings.stop, not settings.skip_special_tokens
        if settings.num_beams > 1:
            return Beams(prompt_ids, rules, tokenizer and tokenizer.decoder(prompt_ids, special))
        stream = tokenizer and TextStream(tokenizer, prompt_ids, stop, special)
        return Sampled(prompt_ids, rules, random_of_row(settings.seed, row), stream)

    def completions(
        self,
        prompts: Sequence[str | Sequence[int]],
        settings: GenerationSettings | None = None,
        *,
        emit: Emit = lambda row, token, text: None,
        extra: Mapping[str, object] | None = None,
        draft: Model | None = None,
        processor: Processor | None = None,
        criteria: Criteria | None = None,
    ) -> list[list[Completion]]:
        """The answers to each prompt, texts or token ids, the best first.

        `emit(row, token, text)` is called with each new token and the text that it completes; rows
        are the answers of all prompts. Where text remains when `criteria` ends decoding, and for
        the answers of beams at their end, the token is -1. `extra` are other inputs of the program
        by name, such as the results of an encoder for these prompts; names that it does not have
        are ignored. `draft` is a model of the same vocabulary, which guesses tokens that are then
        checked at once. `processor` changes logits, `criteria` ends decoding, see `decoding`.
        """
        settings = settings or self.defaults
        ids = [self.encoded(prompt) for prompt in prompts]
        answers = settings.num_return_sequences
        rows = answers if settings.num_beams == 1 else 1  # of a prompt
        searches = [self.search(prompt, settings, row) for prompt in ids for row in range(rows)]
        ports, drafter = self.program.ports, drafter_of(settings, self, draft)
        most = max(1, most_rows(ports, self.dims) // settings.num_beams)
        for first in range(0, len(searches), most):
            group = searches[first : first + most]
            order = [(first + at) // rows for at in range(len(group))]
            decoding = Decoding(
                self.program,
                self.dims,
                group,
                entries(ports, extra or {}, order),
                processor=processor,
                criteria=criteria,
                module=self.module,
                drafter=drafter,
            )
            _tell_all(decoding, emit, first * answers // rows, answers // rows)
        completions = [answer for search in searches for answer in search.answers()]
        return [completions[at : at + answers] for at in range(0, len(completions), answers)]

    def encoded(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """The token ids of a prompt, of a text those of the tokenizer."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int | None = None,
        *,
        emit: Callable[[str], object] | None = None,
        draft: Model | None = None,
        **settings: Any,
    ) -> Any:
        """The text that follows `prompt`, or a list of those that follow each of several.

        With `num_return_sequences` above 1, a list of texts takes the place of each. `settings` are
        fields of GenerationSettings, by default as the checkpoint says. `emit` is called with each
        piece of the text of a single prompt. A `draft` model guesses tokens.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        wanted = "text, or a list of texts (Model.completions takes token ids)"
        check_kind("the prompt", prompts, (list, tuple), wanted)
        for text in prompts:
            check_kind("the prompt", text, str, wanted)
        chosen = self.defaults.changed({**settings, "max_new_tokens": max_new_tokens})
        several = chosen.num_return_sequences > 1
        if emit is not None and (several or len(prompts) > 1):
            raise Error("emit takes the pieces of one text; see Model.completions for several")

        def say(row: int, token: int, text: str) -> None:
            if emit is not None and text:
                emit(text)

        answers = self.completions(prompts, chosen, emit=say, draft=draft)
        texts = [[answer.text for answer in of_prompt] for of_prompt in answers]
        results = [of_prompt if several else of_prompt[0] for of_prompt in texts]
        return results[0] if isinstance(prompt, str) else results


def _token_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of words, alone and behind a space."""
    forms = [form for word in words for form in (word, f" {word}")]
    return [ids for form in forms if (ids := tokenizer.encode(form, special=False))]


def _tell_all(decoding: Decoding, emit: Emit, row: int, answers: int) -> None:
    """Decode, and tell what each search has added; the first is `row`, each has some `answers`."""
    running = [(at, row + at * answers, one) for at, one in enumerate(decoding.searches)]
    for _ in decoding.steps():
        running = [x for x in running if not (decoding.ready[x[0]] and _tell(emit, *x[1:]))]
    for _, at, search in running:
        _tell(emit, at, search, end=True)


def _tell(emit: Emit, row: int, search: Sampled | Beams, end: bool = False) -> bool:
    """Tell what a search has added; whether it is done. `end`: it adds nothing more."""
    if isinstance(search, Beams):
        if search.done or end:
            for at, answer in enumerate(search.answers()):
                emit(row + at, -1, answer.text)
    elif end:
        if rest := search.finish_text():
            emit(row, -1, rest)
    else:
        rest = search.finish_text() if search.done else ""
        emit(row, search.sequences[0][-1], search.text + rest)
    return search.done
