"""Parses pipelines: `shard{mesh="tp=4"}, fuse-gated-mlp, quantize{exclude=["lm_head"]}`.

Where a pipeline is the default of something, a text may begin with it and change it: `default,
after fuse-qkv: my-pass{n=2}, before localize: other, without cse`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from ..errors import Error, did_you_mean
from ..extensions.entry_points import load_installed
from ..text.cursor import Cursor, tokenize
from ..text.literals import WORDS
from .base import PASSES, RESERVED, Pass
from .options import convert, default_of

GROUP = "irc.passes"  # the entry-point group of packages with passes
Default: TypeAlias = Callable[[], Iterable[Pass]]
DEFAULT, _AFTER, _, _WITHOUT = RESERVED
_TOKEN = re.compile(
    r"""\s*(
      "(?:[^"\\\n]|\\.)*+"?                 # a string, also one without its end
    | [A-Za-z_][\w-]*|-inf\b               # a name, a word
    | [-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])
    | \S )""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_INTEGER = re.compile(r"[-+]?\d{1,4000}")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Passes in order. Its text parses to an equal pipeline."""

    passes: tuple[Pass, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.passes))

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def require(self, name: str, option: str) -> None:
        """Raise an Error that names the option if there is no pass of this name."""
        names = [pass_.name for pass_ in self.passes]
        if name not in names:
            raise Error(
                f"{option} {name}: the pipeline has no such pass{did_you_mean(name, names)}"
            )


def parse_pipeline(text: str, default: Default | None = None) -> Pipeline:
    """The passes that `text` names; a TextError points at the error.

    `after NAME: PASS` puts a pass behind the last pass NAME of those before it in the text,
    `before NAME: PASS` in front of the first one, and `without NAME` leaves all of them out.
    """
    return _Reader(text, "<pipeline>", _TOKEN).pipeline(default)


def extends_default(text: str) -> bool:
    """Whether a text begins with the word `default`."""
    return tokenize(text, _TOKEN)[0] == DEFAULT


class _Reader(Cursor):
    """The tokens of a pipeline."""

    def name(self, what: str) -> str:
        token = self.token
        if not _NAME.fullmatch(token):
            self.fail(f"expected {what}, found {self.shown}")
        self.advance()
        return token

    def pipeline(self, default: Default | None) -> Pipeline:
        passes: list[Pass] = []
        while self.token:
            if self.index == 0 and self.token == DEFAULT:
                passes += self.default(default)
            elif self.token in RESERVED[1:] and _NAME.fullmatch(self.ahead):
                self.edit(passes)
            else:
                passes.append(self.one())
            if self.token and not self.accept(","):
                self.fail(f"expected ',' or '{{' after the pass, found {self.shown}")
        return Pipeline(tuple(passes))

    def default(self, default: Default | None) -> Iterable[Pass]:
        if default is None:
            what = "is the pipeline of a backend, for irc compile --pipeline"
            self.fail(f"{DEFAULT} {what}; here, name the passes")
        self.advance()
        return default()

    def edit(self, passes: list[Pass]) -> None:
        """Read a change of the passes before it, and make it."""
        kind = self.token
        self.advance()
        at = self.index
        name = self.name("the name of a pass")
        names = [pass_.name for pass_ in passes]
        if name not in names:
            listed = ", ".join(dict.fromkeys(names)) or "no pass"
            near = did_you_mean(name, names)
            self.fail(f"{kind} {name}: the pipeline has no such pass, but {listed}{near}", index=at)
        if kind == _WITHOUT:
            passes[:] = [pass_ for pass_ in passes if pass_.name != name]
            return
        self.expect(":")
        behind = len(names) - names[::-1].index(name)
        passes.insert(behind if kind == _AFTER else names.index(name), self.one())

    def one(self) -> Pass:
        at = self.index
        name = self.name("the name of a pass")
        cls = PASSES.get(name)
        if cls is None:
            load_installed(GROUP)
            cls = PASSES.get(name)
        if cls is None:
            own = (
                "" if GROUP in sys.modules else f"import {GROUP}, which registers irc's own passes"
            )
            self.fail(f"no pass called {name!r}{did_you_mean(name, PASSES, own)}", index=at)
        options = self.options(cls) if self.token == "{" else {}
        for field in dataclasses.fields(cls):
            if field.name not in options and default_of(field) is dataclasses.MISSING:
                option = field.name.replace("_", "-")
                self.fail(f"{name} requires the option {option}: {cls.kinds[field.name]}", index=at)
        try:
            return cls(**options)
        except Error as error:
            self.fail(f"{name}: {error.message}", index=at)

    def options(self, cls: type[Pass]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for _ in self.items("{", "}"):
            at = self.index
            written = self.name("the name of an option")
            key = written.replace("-", "_")
            kind = cls.kinds.get(key)
            if kind is None:
                fields = [k.replace("_", "-") for k in cls.kinds]
                self.fail(
                    f"{cls.name} has no option {written!r}{did_you_mean(written, fields)}", index=at
                )
            if key in options:
                self.fail(f"{written} is set twice", index=at)
            value_at = self.index + 1 if self.token == "=" else at
            value = self.value() if self.accept("=") else True
            try:
                options[key] = convert(value, kind)
            except Error as error:
                self.fail(f"{cls.name}: {written}: {error.message}", index=value_at)
        return options

    def value(self) -> Any:
        token = self.token
        if token == "[":
            return self.list()
        if token[:1] == '"' and len(token) > 1:
            return self.string()
        if token in WORDS:
            value: Any = WORDS[token]
        elif _NAME.fullmatch(token):  # a word is a string, as in scheme=fp8
            value = token
        else:
            try:
                value = int(token) if _INTEGER.fullmatch(token) else float(token)
            except ValueError:
                self.fail(f"expected a value, found {self.shown}")
        self.advance()
        return value

    def list(self) -> list[Any]:
        values: list[Any] = []
        for _ in self.items("[", "]"):
            if self.token == "[":
                self.fail("a list holds no lists")
            values.append(self.value())
        return values
