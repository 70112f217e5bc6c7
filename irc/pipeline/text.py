"""Pipeline text: `shard{mesh="tp=4"}, fuse-gated-mlp, quantize{group=128, exclude=["lm_head"]}`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ..errors import Error, TextError, did_you_mean
from ..installed import load_installed
from .base import PASSES, Pass, default_of
from .options import convert

GROUP = "irc.passes"  # entry points of packages that have passes
_TOKEN = re.compile(
    r"""\s*(
      "(?:[^"\\\n]|\\.)*"                   # a string
    | [A-Za-z_][\w-]*                       # a name, a word
    | [-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])
    | \S )""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_INTEGER = re.compile(r"[-+]?\d{1,4000}")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Passes in order. Its text reads back to an equal pipeline."""

    passes: tuple[Pass, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.passes))

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def require(self, name: str, option: str) -> None:
        """An Error that names the option if there is no pass of this name."""
        names = [pass_.name for pass_ in self.passes]
        if name not in names:
            raise Error(
                f"{option} {name}: the pipeline has no such pass{did_you_mean(name, names)}"
            )


def parse_pipeline(text: str) -> Pipeline:
    """The passes that `text` names; a TextError points at what cannot be read."""
    return _Reader(text).pipeline()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        found = list(_TOKEN.finditer(text))
        self.tokens = [match[1] for match in found] + [""]
        self.offsets = [match.start(1) for match in found] + [len(text.rstrip())]
        self.index = 0

    @property
    def token(self) -> str:
        return self.tokens[self.index]

    @property
    def shown(self) -> str:
        token = self.token
        return repr(token if len(token) <= 60 else token[:57] + "...") if token else "the end"

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        index = self.index if at is None else at
        raise TextError(message, "<pipeline>", self.text, self.offsets[index])

    def accept(self, token: str) -> bool:
        if self.token != token:
            return False
        self.index += 1
        return True

    def name(self, what: str) -> str:
        token = self.token
        if not _NAME.fullmatch(token):
            self.fail(f"expected {what}, found {self.shown}")
        self.index += 1
        return token

    def pipeline(self) -> Pipeline:
        passes: list[Pass] = []
        while self.token:
            passes.append(self.one())
            if self.token and not self.accept(","):
                self.fail(f"expected ',' or '{{' after the pass, found {self.shown}")
        return Pipeline(tuple(passes))

    def one(self) -> Pass:
        at = self.index
        name = self.name("the name of a pass")
        cls = PASSES.get(name)
        if cls is None:
            load_installed(GROUP)
            cls = PASSES.get(name)
        if cls is None:
            self.fail(f"no pass called {name!r}{did_you_mean(name, PASSES)}", at)
        options = self.options(cls) if self.accept("{") else {}
        for field in dataclasses.fields(cls):
            if field.name not in options and default_of(field) is dataclasses.MISSING:
                option = field.name.replace("_", "-")
                self.fail(f"{name} needs the option {option}: {cls.kinds[field.name]}", at)
        try:
            return cls(**options)
        except Error as error:
            self.fail(f"{name}: {error.message}", at)

    def options(self, cls: type[Pass]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        while not self.accept("}"):
            at = self.index
            written = self.name("the name of an option")
            key = written.replace("-", "_")
            kind = cls.kinds.get(key)
            if kind is None:
                known = [k.replace("_", "-") for k in cls.kinds]
                self.fail(f"{cls.name} has no option {written!r}{did_you_mean(written, known)}", at)
            if key in options:
                self.fail(f"{written} is given twice", at)
            value_at = self.index + 1 if self.token == "=" else at
            value = self.value() if self.accept("=") else True
            try:
                options[key] = convert(value, kind)
            except Error as error:
                self.fail(f"{cls.name}: {written}: {error.message}", value_at)
            if self.token != "}" and not self.accept(","):
                self.fail(f"expected ',' or '}}' in the options of {cls.name}, found {self.shown}")
        return options

    def value(self) -> Any:
        token = self.token
        if token == "[":
            return self.items()
        if token[:1] == '"' and len(token) > 1:
            try:
                text = json.loads(token)
            except ValueError:
                self.fail(f"cannot read the string {self.shown}")
            self.index += 1
            return text
        if token in _WORDS:
            self.index += 1
            return _WORDS[token]
        if _NAME.fullmatch(token):  # a word stands for the string, as in scheme=fp8
            self.index += 1
            return token
        if _INTEGER.fullmatch(token):
            self.index += 1
            return int(token)
        try:
            number = float(token)
        except ValueError:
            self.fail(f"expected a value, found {self.shown}")
        self.index += 1
        return number

    def items(self) -> list[Any]:
        self.index += 1
        items: list[Any] = []
        while not self.accept("]"):
            if self.token == "[":
                self.fail("a list holds no lists")
            items.append(self.value())
            if self.token != "]" and not self.accept(","):
                self.fail(f"expected ',' or ']' in the list, found {self.shown}")
        return items
