"""`parse_tool_calls`: the calls of functions that a model wrote into its answer."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, cast

from .tokenizer import begun

# How calls begin: of Hermes and Qwen, of Llama, of Mistral, and of DeepSeek, whose marks have
# full-width characters. JSON follows; a group is the name of the function, if it has none.
_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"
_CALL, _SEPARATOR = _DEEPSEEK.format("call\u2581begin"), _DEEPSEEK.format("sep")
_CALLS = _DEEPSEEK.format("calls\u2581begin")
_BEGIN = re.compile(
    r"\A\s*(?:```(?:json)?\s*)?(?=[{\[])|(?:<tool_call>|<\|python_tag\|>)\s*"
    rf"|\[TOOL_CALLS\]\s*(?:([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?)?"
    rf"|(?:{_CALLS}\s*)?{_CALL}(?:function{_SEPARATOR})?([\w.-]+)(?:{_SEPARATOR})?\s*"
    r"(?:```(?:json)?\s*)?"
)
_MARKS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", _CALLS, _CALL)
_ENDS = _DEEPSEEK.format("calls?\u2581end")
_END = re.compile(rf"\s*(?:(?:;|```|</tool_call>|{_ENDS})\s*)*")


class ToolCall(NamedTuple):
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls; what is no complete call stays text.

    Calls are written as models of Hermes, Qwen, Llama, Mistral or DeepSeek write them, or the text
    begins with JSON: objects with name and arguments (or parameters), or a list of them.
    """
    calls, kept, place = list[ToolCall](), list[str](), 0
    for begin in _BEGIN.finditer(text):
        new, end = _calls_at(text, begin.end(), begin[1] or begin[2] or "")
        if new and begin.start() >= place:
            calls += new
            kept.append(text[place : begin.start()])
            place = end
    return "".join([*kept, text[place:]]), calls


def may_begin_calls(text: str) -> int:
    """The place from which `text`, once it goes on, may be calls; its length if there is none."""
    if text.lstrip()[:1] in ("", "{", "[", "`"):
        return 0
    places = [text.find(mark) for mark in _MARKS if mark in text]
    return min([*places, len(text) - begun(text, _MARKS)])


def _calls_at(text: str, place: int, name: str) -> tuple[list[ToolCall], int]:
    """The calls of the JSON values from `place` on, and where they end."""
    calls: list[ToolCall] = []
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            return calls, place
        if not (new := _calls_of(value, name)):
            return calls, place
        calls += new
        match = _END.match(text, end)
        place = match.end() if match else end


def _calls_of(value: object, name: str) -> list[ToolCall]:
    """The calls that a JSON value is; empty if a part of it is anything else."""
    if name:
        value = {"name": name, "arguments": value}
    calls: list[ToolCall] = []
    for fields in cast("list[Any]", value) if isinstance(value, list) else [value]:
        call = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
        name, arguments = call.get("name", 0), call.get("arguments", call.get("parameters"))
        if not isinstance(cast("object", name), str) or not isinstance(arguments, dict):
            return []
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return calls
