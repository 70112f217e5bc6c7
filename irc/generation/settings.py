"""`GenerationSettings`: how text is generated; flags, keywords and requests derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..errors import Error
from ..pipeline.options import Setting, option, options_of, settings_of

_EARLY: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
_GRAMMARS = ("json_schema", "regex", "grammar")


def _early_stopping(text: str) -> bool | str:
    if text not in _EARLY:
        raise Error(f"{text!r} is none of {', '.join(_EARLY)}")
    return _EARLY[text]


def _count(default: int, help: str, least: int = 0) -> Any:
    return option(default, help, metavar="N", least=least)


def _number(default: float, help: str, *range: float) -> Any:
    return option(default, help, metavar="X", **dict(zip(("least", "most"), range, strict=False)))


def _text(default: Any, help: str, takes: tuple[type, ...] = ()) -> Any:
    return option(default, help, metavar="TEXT", takes=takes)


@dataclass(frozen=True)
class GenerationSettings:
    """How a prompt is continued; the names are those of transformers' GenerationConfig.

    Penalties change the logits, forbidden tokens and those outside a grammar are left out, the
    temperature divides, and one of the tokens that `top_k`, `top_p`, `min_p` and `typical_p` keep,
    in this order, is drawn. With `temperature` 0 or `top_k` 1 the most likely token is taken.
    Several beams search for the likeliest sequence; `num_beam_groups` are searched one after the
    other, each away from the tokens of those before (Vijayakumar et al., 2016).
    """

    max_new_tokens: int = _count(100, "stop after N tokens", 1)
    min_new_tokens: int = _count(0, "no end of the text before N tokens")
    max_length: int = _count(0, "stop where prompt and answer have N tokens; 0: no limit")
    min_length: int = _count(0, "no end before prompt and answer have N tokens")
    temperature: float = _number(0.0, "divides the logits; 0 takes the most likely token", 0)
    top_k: int = _count(0, "keep the N most likely tokens; 0: all")
    top_p: float = _number(1.0, "keep the likeliest tokens of the probability X together", 0, 1)
    min_p: float = _number(0.0, "keep tokens of X times the largest probability", 0, 1)
    typical_p: float = _number(1.0, "keep the most typical tokens of the probability X", 0, 1)
    repetition_penalty: float = _number(1.0, "divides positive logits of tokens that occurred")
    presence_penalty: float = _number(0.0, "subtracted from logits of tokens of the answer")
    frequency_penalty: float = _number(0.0, "subtracted for each time the answer has the token")
    no_repeat_ngram_size: int = _count(0, "no sequence of N tokens occurs twice; 0: any may")
    stop: tuple[str, ...] = _text((), "the answer ends before it; may be repeated", (str,))
    bad_words: tuple[str, ...] = _text(
        (), "its sequence of tokens never occurs; may be repeated", (str,)
    )
    num_beams: int = _count(1, "search for the likeliest text with N beams", 1)
    num_beam_groups: int = _count(1, "groups of beams that differ", 1)
    diversity_penalty: float = _number(0.0, "for a token of an earlier group of beams", 0)
    length_penalty: float = _number(1.0, "beams are ranked by log-probability / length ** X")
    early_stopping: bool | str = option(
        False,
        "whether beams end with enough texts (true), or when better ones are unlikely (false) or "
        "impossible (never)",
        metavar="WHEN",
        takes=(object,),
        parse=_early_stopping,
    )
    num_return_sequences: int = _count(1, "answers for each prompt", 1)
    seed: int = _count(0, "the same numbers give the same text")
    logprobs: int = _count(0, "return log-probabilities, and those of the N best tokens")
    json_schema: str = _text("", "the answer is JSON of this schema")
    regex: str = _text("", "the answer matches this regular expression")
    grammar: str = _text("", "the answer is of this grammar of Lark")
    prompt_lookup_num_tokens: int = _count(0, "guess up to N tokens from repeated text")
    skip_special_tokens: bool = option(
        True, "leave special tokens out of the text", flag="--skip-special-tokens", both_forms=True
    )

    def __post_init__(self) -> None:
        for setting in _declared().values():
            value = setting.checked(getattr(self, setting.field))
            object.__setattr__(self, setting.field, value)
        self._check_each()
        if self.num_beams > 1 or self.num_beam_groups > 1:
            self._check_beams()
        if sum(bool(getattr(self, name)) for name in _GRAMMARS) > 1:
            raise Error(f"give one of {', '.join(_GRAMMARS)}, not several")

    def _check_each(self) -> None:
        if self.early_stopping not in (True, False, "never"):
            raise Error(f'early_stopping is {self.early_stopping!r}; give True, False or "never"')
        if self.repetition_penalty <= 0:
            raise Error(f"repetition_penalty is {self.repetition_penalty}; give more than 0")
        if not self.max_length and self.min_new_tokens > self.max_new_tokens:
            raise Error(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, which is "
                f"{self.max_new_tokens}; give a larger max_new_tokens"
            )
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise Error(f"an entry of {name} is empty; give texts of at least one character")

    def _check_beams(self) -> None:
        if self.num_beams % self.num_beam_groups:
            raise Error(
                f"num_beams is {self.num_beams}, which {self.num_beam_groups} groups do not "
                "divide; give a multiple of num_beam_groups"
            )
        if self.num_return_sequences > self.num_beams:
            raise Error(
                f"num_return_sequences is {self.num_return_sequences}, but there are "
                f"{self.num_beams} beams; give at most num_beams"
            )
        sampled = ["temperature"] if self.temperature else []
        others = (*_GRAMMARS, "prompt_lookup_num_tokens")
        if refused := sampled + [name for name in others if getattr(self, name)]:
            raise Error(
                f"beam search has no {' or '.join(refused)}; give num_beams=1, or leave it out"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    def limit(self, prompt: int) -> int:
        """The most new tokens after a prompt of so many tokens."""
        if not self.max_length:
            return self.max_new_tokens
        if prompt >= self.max_length:
            raise Error(
                f"the prompt has {prompt} tokens, but max_length is {self.max_length}; give a "
                "larger max_length, or max_new_tokens in its place"
            )
        return self.max_length - prompt

    def least(self, prompt: int) -> int:
        """The fewest new tokens, without an end token, after a prompt of so many tokens."""
        return max(self.min_new_tokens, self.min_length - prompt)

    def changed(self, given: Mapping[str, Any], what: str = "generate") -> GenerationSettings:
        """These settings with others by keyword, None for no change; an Error about wrong ones.

        `max_new_tokens` takes the place of `max_length`, and `min_new_tokens` of `min_length`.
        """
        chosen: dict[str, Any] = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in given.items()
            if value is not None
        }
        values = dict(vars(self))
        for name, other in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if name in chosen:
                values[other] = 0
        if "max_new_tokens" in chosen:
            chosen.pop("max_length", None)
        return options_of(GenerationSettings, {**values, **chosen}, what)


@cache
def _declared() -> dict[str, Setting]:
    return settings_of(GenerationSettings)
