"""Conversations as text: what transformers' `apply_chat_template` gives for the same folder."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from irc.errors import Error
from irc.generation.chat import ChatTemplate
from tests.tiny_checkpoint import write_tokenizer

# Templates with the constructs of eight families.
FAMILIES = {
    "chatml": """{% for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nBe kind.\\n' }}{% endif %}
{{- '<|im_start|>' ~ m['role'] ~ '\\n' ~ m['content'] ~ '<|im_end|>' ~ '\\n' }}
{%- endfor %}
  {% if add_generation_prompt %}<|im_start|>assistant
  {% endif %}""",
    "llama2": """{% set rules = messages[0].content if messages[0].role == 'system' else '' %}
{% for m in (messages[1:] if rules else messages) %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('"roles" & <more>') }}
{% elif m.role == 'user' %}{{ bos_token + (rules if loop.first else '') + m.content | trim }}
{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3.1": """{{- bos_token }}{% if tools is not none %}
{{ strftime_now("%d %b %Y") }}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for m in messages %}{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}
{%- else %}{{ m.role }}{{ m.content | tojson if m.content is iterable }}{% endif %}{% endfor %}""",
    "mistral": """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) -%}{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.index = ns.index + 1 %}
{%- if tools and ns.index == users | length %}{% for k, v in tools[0].function.items() -%}
"{{ k }}": {{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}{% endif %}[INST]{{ m.content }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}
{{ m.tool_calls | map(attribute='function') | list | tojson }}
{%- elif m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}
{%- endif %}{% endfor %}""",
    "qwen3": """{%- macro turn(role, text) %}{{ role + '\\n' + text }}{% endmacro %}
{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}
{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = loop.revindex0 %}{% endif %}{% endfor %}
{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}{{ m.reasoning_content }}
{% endif %}{{- turn(m.role, content) }}{%- endfor %}
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}""",
    "gemma": """{{ bos_token }}{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{ {'assistant': 'model'}.get(m.role, m.role) }}
{{ (m.content | default('', true) | string | trim) + '<end_of_turn>\\n' }}{% endfor %}""",
    "phi3": """{% for m in messages %}{% if not m.content %}{% continue %}{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{{ eos_token if not add_generation_prompt else '<|assistant|>\\n' }}{{ documents is defined }}""",
    "gpt-oss": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}{% endif %}
<|channel|>final<|message|>{{ m.content }}{% endgeneration %}<|return|>
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content | replace('A', 'a') | e }}<|end|>{% endif %}
{% endfor %}{{ builtin | default([]) | join(', ') }}""",
}
CALL = {"id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Köln & <x>"}}}
USER, ANSWER = {"role": "user", "content": " A '<b>' ü\n"}, {"role": "assistant", "content": " B "}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"t": 20}'}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "S"}, USER, ANSWER, USER],
    [USER, {**ANSWER, "content": "<think>x</think>\n\ny"}, USER, {**ANSWER, "reasoning": "why"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "x"}],
    [ANSWER, ANSWER],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"é": [None, 1.5]}}}]


def write_folder(folder: Path, template: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    eos = {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "rstrip": False}
    facts = {"bos_token": "<s>", "eos_token": eos, "chat_template": template}
    facts = {key: value for key, value in facts.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def rendered(folder: Path, *args: Any, **kwargs: Any) -> str:
    template = ChatTemplate.of_folder(folder)
    assert template is not None
    return template.render(*args, **kwargs)


def both(folder: Path, messages: Any, **kwargs: Any) -> str:
    """The text that irc and transformers give; where that raises, what it says."""
    from transformers import AutoTokenizer

    tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(folder))
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except Exception as failure:
        with pytest.raises(Error) as error:
            rendered(folder, messages, **kwargs)
        assert str(failure) in error.value.message
        return str(failure)
    assert rendered(folder, messages, **kwargs) == text
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder, texts = write_folder(tmp_path, FAMILIES[family]), set[str]()
    for i, messages in enumerate(CONVERSATIONS):
        given: dict[str, Any] = {"enable_thinking": False, "builtin": ["a", "b"]} if i % 4 else {}
        given |= {"tools": TOOLS if i % 2 else None, "add_generation_prompt": i % 3 > 0}
        texts.add(both(folder, messages, **given))
    assert len(texts) > 2


def test_where_templates_are_found(tmp_path: Path) -> None:
    tool_use = {"name": "tool_use", "template": "T"}
    folder = write_folder(tmp_path / "a", [{"name": "default", "template": "D"}, tool_use])
    none: dict[str, Any] = {"add_generation_prompt": True}
    assert (both(folder, [USER], **none), both(folder, [USER], tools=[], **none)) == ("D", "T")
    (folder / "chat_template.jinja").write_text("J\n\n")
    assert both(folder, [USER], tools=TOOLS) == "J\n"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("A{{ bos_token }}")
    assert (both(folder, [USER], tools=TOOLS), both(folder, [USER])) == ("A<s>", "J\n")
    folder = write_folder(tmp_path / "b")
    assert ChatTemplate.of_folder(folder) is None
    (folder / "chat_template.json").write_text('{"chat_template": "{{ pad_token }}P"}')
    tokens = {"pad_token": {"content": "<pad>", "lstrip": False}, "bos_token": "<b>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert rendered(folder, [USER]) == "<pad>P"
    assert both(write_folder(folder, "{{ pad_token }}{{ bos_token }}"), [USER]) == "<pad><b>"
    with pytest.raises(Error, match="has no default, only tool_use"):
        rendered(write_folder(folder, [tool_use]), [USER])
    with pytest.raises(Error, match=r"chat_template of .* is no text and no list"):
        rendered(write_folder(folder, 3), [USER])
    with pytest.raises(Error, match=r"a message is an object with role and content, not 'hello'"):
        rendered(write_folder(folder, "x"), ["hello"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles <&>') }}", r"refuses these messages: roles <&>"),
        ("\n{% if %}", r"is wrong at line 2: Expected an expression"),
        ("{{ 1 / 0 }}", r"fails: ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", r"access to attribute '__class__' of 'str' .* unsafe"),
        ("{{ messages.append(1) }}", r"refuses .* unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"fails: RecursionError"),
        ("{% for i in range(1000000) %}{% endfor %}", r"fails: OverflowError: Range too big"),
    ],
)
def test_templates_that_fail(template: str, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, template)
    with pytest.raises(Error, match=f"the chat template of {folder} .*{message}"):
        rendered(folder, [USER])
