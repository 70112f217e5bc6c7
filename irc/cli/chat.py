"""`irc generate --chat`: a conversation with a compiled language model, turn by turn."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, cast

import numpy as np

from ..errors import Error
from ..generation.inputs import cache_range
from ..generation.rows import Array, Rows
from .console import print_json, warn
from .texts import shared_json

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator
    from ..generation.model import Model
    from ..generation.search import Sampled
    from ..generation.settings import GenerationSettings

_HELP = "/reset begins a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    model: Model,
    settings: GenerationSettings,
    communicator: Communicator | None = None,
    system: str = "",
    as_json: bool = False,
) -> int:
    """Answer the lines of standard input; 1 if one of them could not be answered, else 0.

    Answers go to standard output while they grow, with `as_json` all messages at the end.
    """
    if model.chat_template is None:
        raise Error(
            f"{model.folder} has no chat template, which --chat needs: add chat_template.jinja "
            "to the checkpoint and compile again, or give the text as --prompt"
        )
    if settings.num_beams > 1 or settings.num_return_sequences > 1:
        raise Error("--chat gives one answer; leave --num-beams and --num-return-sequences out")
    if settings.prompt_lookup_num_tokens:
        raise Error("--chat makes no guesses; give --prompt-lookup-num-tokens 0")
    begin = [{"role": "system", "content": system}] if system else []
    messages, status, turns = begin, 0, _Turns(model, settings)
    if sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # no end of the program
        warn(_HELP)
    while (line := shared_json(communicator, _read_line)) not in (None, "/exit"):
        if line in ("/reset", "/clear"):
            messages = begin
        elif line.strip():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                ids = model.tokenizer.encode(model.chat_template.render(asked), special=False)
                text = turns.answer(ids, not as_json, communicator is None)
            except Error as error:
                warn(f"{error}\nthis message is left out; {_HELP}")
                status = 1
                continue
            messages = [*asked, {"role": "assistant", "content": text}]
    if as_json:
        print_json({"messages": messages})
    return status


class _Turns:
    """The states of a conversation: a turn computes only what its text has new."""

    def __init__(self, model: Model, settings: GenerationSettings) -> None:
        self.model, self.settings = model, settings
        capacity = cache_range(model.program.ports, model.dims)[1]
        self.rows = Rows.empty(model.program, model.dims, 1, capacity)
        self.tokens: list[int] = []  # that the row has

    def answer(self, ids: list[int], prints: bool, can_stop: bool) -> str:
        """The answer to the tokens of a conversation, as far as Ctrl-C lets it come."""
        search = cast("Sampled", self.model.search(ids, self.settings))
        pieces, interrupts = list[str](), list[int]()

        def say(text: str) -> None:
            pieces.append(text)
            if prints:
                print(text, end="", flush=True)

        before = signal.getsignal(signal.SIGINT)
        if can_stop:  # ranks would stop at different tokens
            signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            logits = self._feed(ids)
            while not interrupts:
                search.advance(logits)
                say(search.text)
                if search.done:
                    break
                self.tokens.append(search.sequences[0][-1])
                logits = self.rows.step([self.tokens[-1:]])
        finally:
            signal.signal(signal.SIGINT, before)
        say(search.finish_text())
        if prints:
            print(flush=True)
        if search.finish == "length" and search.rules.limit < self.settings.limit(len(ids)):
            warn("the cache of the model is full: /reset begins a new conversation")
        return "".join(pieces)

    def _feed(self, ids: list[int]) -> Array:
        """The logits after the tokens of a conversation, of which the row may have the first."""
        kept = min(len(self.tokens), len(ids) - 1)
        while self.tokens[:kept] != ids[:kept]:
            kept -= 1
        if self.rows.can_roll_back:
            self.rows.past = np.array([kept])
        elif kept < len(self.tokens):
            self.rows.clear([0])
            kept = 0
        self.tokens = list(ids)
        return self.rows.feed([ids[kept:]])


def _read_line() -> str | None:
    """A line of standard input, typed or piped; None at its end."""
    typed = sys.stdin.isatty()
    if typed:
        import_module("readline")  # lets `input` edit lines
    try:
        return input("> " if typed else "")
    except UnicodeDecodeError as error:
        raise Error(f"standard input is not text in UTF-8: {error}") from None
    except (EOFError, KeyboardInterrupt) as end:
        if typed:
            print()
        elif isinstance(end, KeyboardInterrupt):
            raise
        return None if isinstance(end, EOFError) else ""
