"""`Constraint`: new text that follows a JSON schema, a regular expression or a grammar.

The package llguidance says which tokens may come next. Schemas may come from strangers: its limits
hold, longer texts are refused, and recursion has a stack that is deep enough for shorter ones.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import Error, installs, printable
from .settings import GenerationSettings
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Array: TypeAlias = np.ndarray[Any, Any]

_LONGEST = 2**17  # characters of a schema, expression or grammar
_LINES = 400  # of a grammar; the time to compile one grows with their square
_STACK = 2**28  # bytes, four times what the deepest recursion of such texts took
_FUEL = 200_000  # llguidance's measure of the size of automata: at most a second
_STATES = 50_000  # of an automaton, of up to 2 kB each
_BLANKS = r"\n?[ \t]{0,20}"  # between the parts of JSON, where a model may go on for ever
_stack_size_lock = threading.Lock()


class Constraint:
    """What may follow the tokens that were accepted so far, for one sequence."""

    def __init__(self, matcher: LLMatcher, tokens: int, ends: Sequence[int]) -> None:
        self._matcher, self._tokens, self._ends = matcher, tokens, list(ends)

    def mask(self, logits: Array) -> None:
        """Set the logits [V] of tokens that may not follow to -inf, in place.

        End tokens may follow only a complete text. An Error if no finite logit is left.
        """
        forbidden = ~np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        banned = np.ones(len(logits), bool)
        count = min(len(logits), self._tokens)
        banned[:count] = np.unpackbits(forbidden, count=count, bitorder="little")
        banned[[end for end in self._ends if end < len(logits)]] = not self._matcher.is_accepting()
        logits[banned] = -np.inf
        if not np.isfinite(logits.max()):
            raise Error(
                "no token is left that the schema, expression or grammar allows; other settings "
                "forbid those that it allows (bad words, a least length, repeated n-grams)"
            )

    def accept(self, token: int) -> None:
        """Continue after `token`; an Error if it may not follow."""
        if token in self._ends and self._matcher.is_accepting():
            return
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            raise Error(f"the schema, expression or grammar cannot be followed: {reason}")


def constraint_of(
    settings: GenerationSettings, tokenizer: Tokenizer, ends: Sequence[int]
) -> Constraint | None:
    """What the settings ask of one new text, whose end tokens are `ends`; None for any text.

    `json_schema` is an object, where `{}` stands for any object; `regex` follows Rust's regex
    package and matches the whole text; `grammar` is Lark's in llguidance's dialect, or GBNF. An
    Error with the library's reason for what it does not accept.
    """
    schema, regex = settings.json_schema, settings.regex
    what = "JSON schema" if schema else "regular expression" if regex else "grammar"
    if not (text := schema or regex or settings.grammar):
        return None
    if len(text) > _LONGEST:
        raise Error(f"the {what} has {len(text)} characters; expected at most {_LONGEST}")
    try:
        vocabulary = _vocabulary(tokenizer)
    except ImportError as error:
        raise Error(f"a {what} needs llguidance ({error}): {installs('serve')}") from None
    with _stack_size_lock, ThreadPoolExecutor(1) as pool:
        before = threading.stack_size(_STACK)
        matcher = pool.submit(_compiled, what, text, vocabulary)
        threading.stack_size(before)
        return Constraint(matcher.result(), vocabulary.eos_token, ends)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokens as llguidance wants them, which takes seconds for 100,000.

    Its end token is one behind all others, because it would take any for one of the grammar.
    """
    from llguidance import LLTokenizer

    description: dict[str, Any] = json.loads(tokenizer.as_json())
    decoder: dict[str, Any] = description["decoder"] or {}
    parts: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    for part in parts:
        if part.get("type") == "Metaspace":  # which llguidance knows only in these words
            pattern = {"String": part["replacement"]}
            space = {"type": "Replace", "pattern": pattern, "content": " "}
            decoders = [space, {"type": "ByteFallback"}]
            description["decoder"] = {"type": "Sequence", "decoders": decoders}
    end = {"id": tokenizer.size, "content": "<|end of constrained text|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    description["added_tokens"].append(end | flags)
    try:
        return LLTokenizer(json.dumps(description), eos_token=tokenizer.size)
    except ValueError as error:
        raise Error(f"the tokenizer of this model cannot constrain text: {error}") from None


def _compiled(what: str, text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """The matcher of a text; an Error if it is none."""
    from llguidance import LLMatcher, LLParserLimits
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        if what == "JSON schema":
            schema = text if "".join(text.split()) != "{}" else '{"type": "object"}'
            grammar = LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _BLANKS})
        elif what == "regular expression":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            lark = any_to_lark(text) if "::=" in text else text
            if (lines := lark.count("\n")) > _LINES:
                raise Error(f"the grammar has {lines} lines; expected at most {_LINES}")
            grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise Error(f"the {what} is not accepted: {error}") from None
    limits = LLParserLimits(
        initial_lexer_fuel=_FUEL, max_lexer_states=_STATES, verbose_errors=False
    )
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show only here
    if matcher.is_error():
        raise Error(f"the {what} is not accepted: {_reason(matcher)}")
    return matcher


def _reason(matcher: LLMatcher) -> str:
    """The library's message in one line, without its own state."""
    message = re.split("<backtrace>|<non-verbose/>", matcher.get_error())[0]
    return printable(" ".join(message.split()))
