"""`Reader`: bodies of requests, from which answers begin."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, cast

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from ..errors import Error, did_you_mean
from ..generation.settings import GenerationSettings
from ..pipeline.options import settings_of
from ..schema import parsed
from .responses import ApiError, Chat, Completion, Json, encoded

if TYPE_CHECKING:
    from ..generation.model import Model

Body = TypeVar("Body", bound="_Body")
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Few: TypeAlias = Annotated[int, Meta(ge=0, le=20)]

MOST_CHOICES, MOST_INPUTS = 128, 2048
MOST_WORDS, LONGEST_WORD = 64, 1000  # every step looks for the words
# What OpenAI has and a server of one model does not need.
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "reasoning_effort", "verbosity", "prediction"),
}
# Settings that requests state in another way, and those of several rows, which the engine has not.
_ROWS = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1}
_NOT_IN_REQUESTS = {
    *("max_new_tokens", "max_length", "logprobs", "prompt_lookup_num_tokens", *_ROWS),
    *("diversity_penalty", "length_penalty", "early_stopping"),
}
_SETTINGS = settings_of(GenerationSettings).keys() - _NOT_IN_REQUESTS
_OBJECT: Json = {"type": "object"}


class _Body(Struct, kw_only=True):
    model: str = ""


class _Generation(_Body, kw_only=True):
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: dict[str, bool | None] = {}
    max_tokens: Count | None = None

    def answer(self) -> Json:
        """The fields that an answer has as well."""
        usage = self.stream and bool(self.stream_options.get("include_usage"))
        return {"copies": self.n, "stream": self.stream, "usage_in_stream": usage}


class _CompletionBody(_Generation, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Few | None = None


class _Function(Struct, omit_defaults=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    arguments: str = ""  # of a call, as JSON


class _Tool(Struct, omit_defaults=True):  # that can be called, has to be, or was
    type: Literal["function"]
    function: _Function
    id: str = ""


class _Text(Struct, tag="text"):
    text: str


class _Message(Struct, omit_defaults=True):  # other fields, such as refusal, have no effect
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str = ""
    tool_calls: list[_Tool] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None


class _ChatBody(_Generation, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | _Tool = "auto"
    parallel_tool_calls: bool = True
    response_format: Json = {}
    chat_template_kwargs: Json = {}  # variables of the template, as vLLM has them
    logprobs: bool = False
    top_logprobs: Few = 0


class _EmbeddingBody(_Body, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"


class Reader:
    """Reads bodies for a model that is served as `name`.

    `capacity` is the most tokens of a prompt and its answer, 0 for no limit, and `most_new` the
    most of an answer.
    """

    def __init__(self, model: Model, name: str, capacity: int, most_new: int) -> None:
        self.model, self.name, self.capacity, self.most_new = model, name, capacity, most_new

    def completion(self, data: bytes) -> Completion:
        """The answer to a body of /v1/completions."""
        body, given = self._read(data, _CompletionBody)
        prompts = self._prompts("prompt", body.prompt)
        if len(prompts) * body.n > MOST_CHOICES:
            message = f"{len(prompts)} prompts with n={body.n}; at most {MOST_CHOICES} answers"
            raise ApiError(400, message, param="n")
        logprobs, limit = body.logprobs, body.max_tokens
        settings = [self._settings(given, prompt, limit, logprobs, False) for prompt in prompts]
        tokenizer = self.model.tokenizer
        return Completion(self.name, tokenizer, prompts, settings, logprobs, **body.answer())

    def chat(self, data: bytes) -> Chat:
        """The answer to a body of /v1/chat/completions; it takes all the room, if not limited."""
        body, given = self._read(data, _ChatBody)
        if (template := self.model.chat_template) is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(400, message, "no_chat_template")
        calls, schema = _calls(body)
        format = _schema_of(body.response_format)
        if schema and format:
            message = "a call of a tool is required, so the answer has no other format"
            raise ApiError(400, message, param="response_format")
        if schema or format:
            given["json_schema"] = encoded(schema or format).decode()
        if calls == "auto":
            given["skip_special_tokens"] = False  # the calls of some models begin with one
        messages = [_message(message, at) for at, message in enumerate(body.messages)]
        tools = [to_builtins(tool) for tool in body.tools] if calls else None
        variables: Json = {**body.chat_template_kwargs, "tools": tools}
        text = template.render(messages, **variables)
        prompt = self.model.tokenizer.encode(text, special=False)
        limit = body.max_completion_tokens or body.max_tokens
        logprobs = body.top_logprobs if body.logprobs else None
        settings = [self._settings(given, prompt, limit, logprobs, True)]
        tokenizer = self.model.tokenizer
        more: Json = {**body.answer(), "calls": calls}
        return Chat(self.name, tokenizer, [prompt], settings, logprobs, **more)

    def embedding(self, data: bytes) -> tuple[list[list[int]], bool]:
        """The token ids of the texts of a body of /v1/embeddings; whether it asks for base64."""
        body, _ = self._read(data, _EmbeddingBody, ())
        prompts = self._prompts("input", body.input)
        if len(prompts) > MOST_INPUTS:
            message = f"input has {len(prompts)} texts; send at most {MOST_INPUTS}"
            raise ApiError(400, message, param="input")
        return prompts, body.encoding_format == "base64"

    def check_model(self, name: str) -> None:
        """An ApiError unless the model that this server has is meant."""
        if name not in ("", self.name):
            message = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def _read(
        self, data: bytes, schema: type[Body], settings: Collection[str] = _SETTINGS
    ) -> tuple[Body, Json]:
        """The body, and the fields of GenerationSettings among its fields; null is no field."""
        try:
            fields = parsed(data)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON in UTF-8: {error}", "invalid_json") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is not a JSON object", "invalid_json")
        names: set[str] = {*schema.__struct_fields__, *settings}
        present = {
            name: value
            for name, value in cast("Json", fields).items()
            if value is not None and name not in _WITHOUT_EFFECT
        }
        if unknown := next(iter(present.keys() - names), None):
            message = f"this server has no parameter {unknown!r}{did_you_mean(unknown, names)}"
            raise ApiError(400, message, "unknown_parameter", unknown)
        given = {name: present.pop(name) for name in present.keys() & set(settings)}
        try:
            body = convert(present, schema)
        except ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            param = place.rstrip("`") or None
            what += "; this model reads text only" if ".content[" in place else ""
            raise ApiError(400, f"{param}: {what}" if param else what, param=param) from None
        self.check_model(body.model)
        return body, given

    def _prompts(self, name: str, value: str | list[str | int | list[int]]) -> list[list[int]]:
        """The token ids of the texts, or lists of ids, of a field that takes one or several."""
        several = value if isinstance(value, list) else [value]
        kinds = {type(entry) for entry in several}
        if len(kinds) != 1:
            message = f"{name} is empty or mixes texts and token ids; give some of one kind"
            raise ApiError(400, message, param=name)
        if kinds == {int}:
            return [cast("list[int]", several)]
        encode = self.model.tokenizer.encode
        return [encode(e) if isinstance(e, str) else cast("list[int]", e) for e in several]

    def _settings(
        self, given: Json, prompt: list[int], limit: int | None, logprobs: int | None, fills: bool
    ) -> GenerationSettings:
        """The model's settings with those of a request; an ApiError where the slot holds fewer.

        `fills`: an answer without a limit takes all the room.
        """
        room = min(self.most_new, self.capacity - len(prompt) if self.capacity else self.most_new)
        usual = self.model.defaults
        if limit is None:
            if 0 < usual.max_length <= len(prompt):
                fills = True
            limit = room if fills else min(usual.limit(len(prompt)), room)
            limit = max(1, limit)
        if limit > room:
            most = f"{self.capacity} together, and " if self.capacity else ""
            message = (
                f"the prompt has {len(prompt)} tokens and the answer may have {limit}; this server "
                f"takes {most}{self.most_new} of an answer: shorten the prompt, or ask for fewer"
            )
            raise ApiError(400, message, "context_length_exceeded", "max_tokens")
        changes = {"seed": secrets.randbits(32), **given, **_ROWS, "max_new_tokens": limit}
        if "min_new_tokens" not in given and usual.min_new_tokens > limit:
            changes["min_new_tokens"] = limit
        if logprobs is not None:
            changes["logprobs"] = max(logprobs, 1)
        if isinstance(changes.get("stop"), str):
            changes["stop"] = [changes["stop"]]
        try:
            settings = usual.changed(changes, "this server")
        except OverflowError as error:
            raise ApiError(400, f"a number is too large: {error}") from None
        except Error as error:
            name, text = str(error).partition(" ")[0], str(error)
            text = text.replace("max_new_tokens", "max_tokens")
            raise ApiError(400, text, param=name if name in given else None) from None
        words = settings.stop + settings.bad_words
        if len(words) > MOST_WORDS or max(map(len, words), default=0) > LONGEST_WORD:
            message = f"stop and bad_words take {MOST_WORDS} texts of {LONGEST_WORD} characters"
            raise ApiError(400, f"{message}; give fewer or shorter ones")
        return settings


def _message(message: _Message, at: int) -> Json:
    """A message as chat templates read it."""
    fields = cast("Json", to_builtins(message))
    fields["role"] = "system" if message.role == "developer" else message.role
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [part.text for part in content]
    fields["content"] = "".join(parts)
    for call in fields.get("tool_calls", ()):
        try:
            arguments = parsed(call["function"].get("arguments", "{}").encode())
        except ValueError as error:
            text = f"the arguments of a call in messages[{at}] are not JSON: {error}"
            raise ApiError(400, text, param=f"messages[{at}].tool_calls") from None
        call["function"]["arguments"] = arguments
    return fields


def _schema_of(format: Json) -> Json:
    """The JSON schema that an answer follows; {} for none."""
    match format:
        case {"type": "json_object"}:
            return _OBJECT
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            return format["json_schema"]["schema"] or _OBJECT
        case _ if format.get("type", "text") == "text":
            return {}
        case _:
            message = "response_format has the type text, json_object, or json_schema with "
            message += '"json_schema": {"schema": {...}}'
            raise ApiError(400, message, param="response_format")


def _calls(body: _ChatBody) -> tuple[str, Json]:
    """How an answer holds calls (see `Chat`), and the schema that they must follow, {} for none."""
    choice = body.tool_choice
    if choice in ("none", "auto"):
        return "auto" if body.tools and choice == "auto" else "", {}
    name = choice.function.name if isinstance(choice, _Tool) else None
    functions = [tool.function for tool in body.tools if name in (None, tool.function.name)]
    if not functions:
        message = f"tool_choice requires a call, but tools have no {name or 'function'}"
        raise ApiError(400, message, param="tool_choice")
    definitions: Json = {}
    for function in functions:
        own = function.parameters.get("$defs", {})
        if not isinstance(own, dict):
            message = f"$defs in the parameters of {function.name} is no object"
            raise ApiError(400, message, param="tools")
        definitions |= own
    return "forced", {
        "type": "array",
        "items": {"anyOf": [_schema_of_call(function) for function in functions]},
        "minItems": 1,
        **({"maxItems": 1} if name or not body.parallel_tool_calls else {}),
        "$defs": definitions,
        "x-guidance": {"whitespace_flexible": False},  # blanks, which small models write for ever
    }


def _schema_of_call(function: _Function) -> Json:
    properties = {"name": {"const": function.name}, "arguments": function.parameters or _OBJECT}
    required = {"required": ["name", "arguments"], "additionalProperties": False}
    return {**_OBJECT, "properties": properties, **required}
