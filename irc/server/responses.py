"""Answers: errors, continuations whole or in the chunks of a stream, embeddings."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import DecodeError, json

from ..errors import printable
from ..generation.settings import GenerationSettings
from ..generation.tool_calls import ToolCall, may_begin_calls, parse_tool_calls
from .engine import Event, TokenEvent

if TYPE_CHECKING:
    from ..generation.tokenizer import Tokenizer

Json: TypeAlias = dict[str, Any]

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# how a continuation may fail -> the status and code of the answer
_FAILURES = {
    "deadline": (504, "timeout"),
    "cancelled": (503, "stopping"),
    "refused": (400, None),
    "error": (500, "engine_failed"),
}
_LEAST = -9999.0  # for the log-probability of what cannot be; JSON has no infinity


class ApiError(Exception):
    """A refusal or a failure, with what OpenAI's API says of it, and `headers` of HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": printable(message), "type": _TYPES.get(status, kind)}
        self.body: Json = {"error": {**error, "param": param, "code": code}}


encoded = json.encode  # in UTF-8; NaN and infinities become null


@dataclass
class Choice:
    """One continuation so far; earlier chunks have `sent` characters and `sent_tokens`."""

    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=lambda: list[TokenEvent]())
    finish: str | None = None  # the reason
    sent: int = 0
    sent_tokens: int = 0
    has_role: bool = False

    def add(self, event: Event) -> None:
        """Take the next event of the engine; an ApiError where it is a failure."""
        if isinstance(event, TokenEvent):
            self.text += event.text
            self.tokens.append(event)
        elif event.reason in _FAILURES:
            status, code = _FAILURES[event.reason]
            raise ApiError(status, event.message, code)
        else:
            self.finish = event.reason


@dataclass
class Completion:
    """The answer of /v1/completions: `copies` continuations of each prompt, with its settings.

    `logprobs`: of how many likely tokens log-probabilities are given, None for none at all.
    """

    model: str
    tokenizer: Tokenizer
    prompts: list[list[int]]
    settings: list[GenerationSettings]
    logprobs: int | None
    copies: int
    stream: bool
    usage_in_stream: bool

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in self.prompts for _ in range(self.copies)]
        identity = f"{self.prefix}-{secrets.token_hex(12)}"
        self.head: Json = {"id": identity, "created": int(time.time()), "model": self.model}

    @property
    def counts(self) -> tuple[int, int]:
        """The tokens of the prompts, and of all continuations so far."""
        new = sum(len(choice.tokens) for choice in self.choices)
        return sum(map(len, self.prompts)), new

    @property
    def usage(self) -> Json:
        """What the request took."""
        prompt, new = self.counts
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self) -> Json:
        """The body, once every continuation has ended."""
        choices = [self._part(index, "message") for index in range(len(self.choices))]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage}

    def chunk_of(self, index: int) -> Json | None:
        """What no earlier chunk has of a continuation; None where that is nothing."""
        part = self._part(index, "delta")
        return None if part is None else self._chunk([part])

    def last_chunk(self) -> Json | None:
        """What follows the continuations: the usage, where the request asks for it."""
        return {**self._chunk([]), "usage": self.usage} if self.usage_in_stream else None

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self.head, "object": self.kind_of_chunk, "choices": choices}
        return {**chunk, "usage": None} if self.usage_in_stream else chunk

    def _part(self, index: int, key: str) -> Json | None:
        """The text and tokens of no earlier chunk, under `key` where the API nests them."""
        choice = self.choices[index]
        text, calls = self._certain(choice)
        begin, text = choice.sent, text[choice.sent :]
        choice.sent += len(text)
        tokens = choice.tokens[choice.sent_tokens :]
        choice.sent_tokens += len(tokens)
        if not (text or choice.finish or (tokens and self.logprobs is not None)):
            return None
        return {
            "index": index,
            **self._content(choice, text, calls, key),
            "logprobs": None if self.logprobs is None else self._logprobs(tokens, begin),
            "finish_reason": "tool_calls" if calls and choice.finish == "stop" else choice.finish,
        }

    def _certain(self, choice: Choice) -> tuple[str, Sequence[ToolCall]]:
        """The text so far that is no call, and the calls."""
        return choice.text, ()

    def _content(self, choice: Choice, text: str, calls: Sequence[ToolCall], key: str) -> Json:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[TokenEvent], begin: int) -> Json:
        offsets = np.cumsum([begin, *(len(event.text) for event in tokens)]).tolist()
        best = [
            {  # the likeliest of tokens with one text
                self._word(token): max(chance, _LEAST)
                for token, chance in reversed(event.top[: self.logprobs])
            }
            for event in tokens
        ]
        return {
            "tokens": [self._word(event.token) for event in tokens],
            "token_logprobs": [max(event.logprob, _LEAST) for event in tokens],
            "top_logprobs": best if self.logprobs else None,
            "text_offset": offsets[:-1],
        }

    def _word(self, token: int) -> str:
        return self.tokenizer.decode([token])


@dataclass
class Chat(Completion):
    """The answer of /v1/chat/completions.

    `calls`: "" where the model has no tools; "auto": its text may hold calls; "forced": its text is
    a JSON list of calls.
    """

    calls: str = ""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _certain(self, choice: Choice) -> tuple[str, Sequence[ToolCall]]:
        text = choice.text
        if not self.calls:
            return text, ()
        if choice.finish is None:
            return text[: may_begin_calls(text) if self.calls == "auto" else 0], ()
        return parse_tool_calls(text) if self.calls == "auto" else _forced_calls(text)

    def _content(self, choice: Choice, text: str, calls: Sequence[ToolCall], key: str) -> Json:
        message: Json = {} if choice.has_role else {"role": "assistant"}
        choice.has_role = True
        if calls:  # in a stream the text before them has been sent
            text = text if key == "delta" else text.strip()
        message["content"] = text or None if calls else text
        if calls:
            message["tool_calls"] = [_call(at, call, key) for at, call in enumerate(calls)]
        return {key: message}

    def _logprobs(self, tokens: Sequence[TokenEvent], begin: int) -> Json:
        content = [
            {
                **self._named(event.token, event.logprob),
                "top_logprobs": [self._named(*pair) for pair in event.top[: self.logprobs]],
            }
            for event in tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, chance: float) -> Json:
        word = self._word(token)
        return {"token": word, "logprob": max(chance, _LEAST), "bytes": list(word.encode())}


def _forced_calls(text: str) -> tuple[str, Sequence[ToolCall]]:
    """The calls of a list that a schema enforced; its text where the list is incomplete."""
    try:
        calls = json.decode(text)
    except DecodeError:
        return text, ()
    return "", [ToolCall(c["name"], encoded(c["arguments"]).decode()) for c in calls]


def _call(index: int, call: ToolCall, key: str) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    entry = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return {"index": index, **entry} if key == "delta" else entry


def embeddings(model: str, vectors: np.ndarray[Any, Any], tokens: int, base_64: bool) -> Json:
    """The answer of /v1/embeddings for f32 [n, D]; in base64 the bytes are little-endian."""
    rows = vectors.astype("<f4")
    shown = [base64.b64encode(row.tobytes()).decode() for row in rows] if base_64 else rows.tolist()
    data = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(shown)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "data": data, "usage": usage}
