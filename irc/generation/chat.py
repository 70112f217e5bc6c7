"""`ChatTemplate`: the text of a conversation, by the Jinja template of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..errors import Error
from ..files import open_file
from ..json_files import read_object
from .tokenizer import special_tokens

# The names of what a model thinks before it answers; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of a folder by name; source: `apply_chat_template` of transformers."""

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str], name: str) -> None:
        self._templates, self._tokens, self._name = templates, tokens, name

    @staticmethod
    def of_folder(folder: Path) -> ChatTemplate | None:
        """The templates in the files of a folder; None if it has none."""
        paths = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
        if (folder / "chat_template.jinja").is_file():
            paths.setdefault("default", folder / "chat_template.jinja")
        templates = {name: _read(path) for name, path in paths.items()}
        for name in ("tokenizer_config.json", "chat_template.json"):
            path = folder / name
            if not templates and path.is_file():
                templates = _named_templates(read_object(path).get("chat_template"), path)
        name = f"the chat template of {folder}"
        return ChatTemplate(templates, special_tokens(folder), name) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of messages, with special tokens in it, to be encoded without adding more.

        A message is an object such as {"role": "user", "content": "Hello"}, `tools` are those of
        OpenAI's API, `kwargs` other variables of the template. With `add_generation_prompt` the
        text ends where the model's answer begins. An Error if the template refuses or fails.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        from .chat_sandbox import compiled

        given = {"documents": None, **kwargs, "messages": messages, "tools": tools}
        given["add_generation_prompt"] = add_generation_prompt
        names = ("default",) if tools is None else ("tool_use", "default")
        source = next((self._templates[name] for name in names if name in self._templates), None)
        if source is None:
            raise Error(f"{self._name} has no default, only {', '.join(self._templates)}")
        try:
            variables: dict[str, Any] = {**self._tokens, **json.loads(json.dumps(given))}
            variables["messages"] = [_message(message) for message in variables["messages"]]
            return compiled(source).render(variables)
        except (TypeError, ValueError) as error:
            raise Error(
                f"{self._name} cannot take these messages, tools or variables: {error}"
            ) from None
        except TemplateSyntaxError as error:
            raise Error(f"{self._name} is wrong at line {error.lineno}: {error}") from None
        except TemplateError as error:
            raise Error(f"{self._name} refuses these messages: {error}") from None
        except Exception as error:
            raise Error(f"{self._name} fails: {type(error).__name__}: {error}") from error


def _message(message: Any) -> dict[str, Any]:
    """A message as templates read it: without nulls, its reasoning under each name."""
    if not isinstance(message, dict):
        raise Error(f"a message is an object with role and content, not {message!r}")
    given = cast("dict[str, Any]", message)
    fields = {name: value for name, value in given.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is not None:
        fields = {_REASONING[1]: reasoning, **fields, _REASONING[0]: reasoning}
    return fields


def _read(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Error(f"cannot read {path}: {error}") from None


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """The templates that a JSON file gives: none, one, or objects with name and template."""
    if isinstance(value, str):
        return {"default": value}
    try:
        return {entry["name"]: str(entry["template"]) for entry in value or ()}
    except (TypeError, KeyError):
        raise Error(f"chat_template of {path} is no text and no list of name, template") from None
