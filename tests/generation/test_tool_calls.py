"""Calls of functions in the formats of model families; anything else stays text."""

import json
import random

import pytest

from irc.generation.tool_calls import may_begin_calls, parse_tool_calls
from tests.fresh import session_seed

ARGUMENTS = {"city": 'K"öl}n', "days": [1, {"a": None}], "text": "<tool_call>[TOOL_CALLS]"}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL, LLAMA = f'{{"name": "f", "arguments": {JSON}}}', f'{{"name":"f","parameters":{JSON}}}'
DEEP = "<\uff5ctool\u2581{}\uff5c>".format
BEGIN, SEP, END = DEEP("call\u2581begin"), DEEP("sep"), DEEP("call\u2581end")
CALLS, DONE = DEEP("calls\u2581begin"), DEEP("calls\u2581end")
V3 = f"{BEGIN}function{SEP}f\n```json\n{JSON}\n```{END}"
V31 = f"{BEGIN}f{SEP}{JSON}{END}"
# text, what stays of it, how many calls
FORMATS = {
    "qwen": (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", 1),
    "hermes": (f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "", 2),
    "unclosed": (f"<tool_call>\n{CALL}", "", 1),
    "llama": (LLAMA, "", 1),
    "llama, two": (f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
    "mistral": (f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
    "mistral, named": (f"Well[TOOL_CALLS]f[CALL_ID]x1[ARGS]{JSON}[TOOL_CALLS]f{JSON}", "Well", 2),
    "deepseek": (f"So{CALLS}{V3}\n{V3}{DONE}", "So", 2),
    "deepseek 3.1": (f"{CALLS}{V31}{V31}{DONE}", "", 2),
    "list": (f" [{CALL}, {LLAMA}]\n", "", 2),
    "fence": (f"```json\n{CALL}\n```", "", 1),
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_families(name: str) -> None:
    text, kept, count = FORMATS[name]
    rest, calls = parse_tool_calls(text)
    assert (rest.strip(), calls) == (kept, [("f", JSON)] * count)
    shown = text[: may_begin_calls(text)]
    assert shown.rstrip() == kept
    for end in range(len(text)):  # what a stream shows is never taken back
        assert shown.startswith(text[: may_begin_calls(text[:end])][:end])


@pytest.mark.parametrize(
    "text",
    [
        "Hello {name}, [1] < 2",
        '{"name": "Ada", "age": 36}',
        '{"name": "f", "arguments": 3}',
        '{"name": 3, "arguments": {}}',
        f"It is {CALL}",
        f"[{CALL}, 3]",
        "[]",
        CALL[:-1],
        f"<tool_call>{CALL[:-2]}</tool_call>",
        "[TOOL_CALLS]f[ARGS]",
        f"{BEGIN}f{SEP}[1]{END}",
        "[" * 100_000,
        "<tool_call>" * 9999 + " " * 99_999,
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


def test_any_text_is_accepted() -> None:
    assert parse_tool_calls(f"{CALL} and more") == ("and more", [("f", JSON)])
    inner = '{"a": "[TOOL_CALLS]g{}"}'
    assert parse_tool_calls(f"[TOOL_CALLS]f{inner}") == ("", [("f", inner)])
    source = random.Random(session_seed())
    parts = [CALL, JSON, BEGIN, SEP, END, *'{["<`; \n', "<tool_call>", "[TOOL_CALLS]", "```", "f"]
    for size in range(300):
        text = "".join(source.choices(parts, k=size % 12))
        kept, calls = parse_tool_calls(text)
        assert calls or kept == text
        assert all(json.loads(call.arguments) in (ARGUMENTS, json.loads(CALL)) for call in calls)
