"""Differences of two texts of modules, in which values that correspond have one name."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count

_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|(%[\w.]+)')  # or a string, in which a name is none
_FUNCTION = re.compile(r"^  func @([^(]+)(\(.*)\n((?:    .*\n)*)", re.MULTILINE)


def differences(
    old: str, new: str, before: str = "before", after: str = "after", context: int = 3
) -> Iterator[str]:
    """A unified diff of two texts, line by line; `before` and `after` are their titles.

    Values of the new text have the names of those of the old one that they correspond to. The
    names themselves are compared only where nothing else differs.
    """
    renamed = with_names_of(old, new)
    lines = old.splitlines(), (new if renamed == old else renamed).splitlines()
    return difflib.unified_diff(*lines, before, after, n=context, lineterm="")


def with_names_of(old: str, new: str) -> str:
    """The new text, its values renamed as those of the old text that they correspond to."""
    old_functions = {name: _Lines(header, body) for name, header, body in _FUNCTION.findall(old)}

    def renamed(match: re.Match[str]) -> str:
        name, header, body = match.groups()
        if name not in old_functions:
            return match[0]
        names = _Names(old_functions[name], _Lines(header, body)).chosen()
        return match[0].removesuffix(body) + _substituted(body, names)

    return _FUNCTION.sub(renamed, new)


def bodies(text: str) -> dict[str, str]:
    """The lines of every function of a module's text, without its signature."""
    return {name: body for name, _, body in _FUNCTION.findall(text)}


def _names(text: str) -> list[str]:
    return [match[1] for match in _NAME.finditer(text) if match[1]]


def _substituted(text: str, names: Mapping[str, str] | None = None) -> str:
    """A text with other names; all names become `%` where none are given."""
    return _NAME.sub(
        lambda m: m[0] if m[1] is None else "%" if names is None else names[m[1]], text
    )


class _Line:
    """An operation: its text without names, and the names of its results and operands."""

    def __init__(self, text: str) -> None:
        self.key, names = _substituted(text), _names(text)
        head, equals, rest = self.key.partition(" = ")
        results = head.count("%") if equals and head.startswith("    %") else 0
        self.opname = (rest if results else self.key).split(maxsplit=1)[0]
        self.results, self.operands = names[:results], tuple(names[results:])


class _Lines:
    """The operations of a function."""

    def __init__(self, header: str, body: str) -> None:
        self.args = {*_names(header)}
        self.lines = [_Line(text) for text in body.splitlines()]
        self.producers = {name: line for line in self.lines for name in line.results}
        self.places = {name: place for place, name in enumerate(self.producers)}
        self.uses: dict[str, list[tuple[_Line, int]]] = {}
        for line in self.lines:
            for place, name in enumerate(line.operands):
                self.uses.setdefault(name, []).append((line, place))
        alone = [line for line in self.lines if not line.operands]
        self.constants = {name: line.key for line in alone for name in line.results}


class _Names:
    """The names of the old function that values of the new one take.

    Operations are paired if they compute the same from the same arguments, if they alone read so,
    if they follow others in both functions, or if paired operations use them in the same place. A
    value that takes the place of another one in a paired operation takes its name.
    """

    def __init__(self, old: _Lines, new: _Lines) -> None:
        self.old, self.new = old, new
        self.names = {arg: arg for arg in new.args}
        self.taken = {*new.args}
        self.pairs: dict[_Line, _Line] = {}  # new to old
        self.paired: set[_Line] = set()  # old

    def chosen(self) -> dict[str, str]:
        """The name of every value of the new function."""
        for pair_alike in (self.pair_unique, self.pair_blocks):
            # operations without operands are paired as their users are
            self.pair_equal([line for line in self.unpaired(self.new) if line.operands])
            pair_alike(self.unpaired(self.old), self.unpaired(self.new))
            self.pair_used()
        self.pair_equal(self.unpaired(self.new))
        for name in (name for name in self.new.producers if name not in self.names):
            self.give(name, name if name not in self.taken else self.fresh(name))
        return self.names

    def fresh(self, name: str) -> str:
        """A name that neither function has."""
        base = "%" if name[1:].isdecimal() else name.partition(".")[0] + "."
        used = self.taken | self.old.producers.keys() | self.new.producers.keys()
        return next(free for n in count() if (free := f"{base}{n}") not in used)

    def pair_equal(self, new: list[_Line]) -> None:
        """Pair operations over paired operands."""
        free: dict[tuple[object, ...], list[_Line]] = {}
        for line in reversed(self.unpaired(self.old)):
            operands = (self.old.constants.get(name, name) for name in line.operands)
            free.setdefault((line.key, *operands), []).append(line)
        for line in new:
            operands = (self.new.constants.get(n, self.names.get(n)) for n in line.operands)
            same = free.get((line.key, *operands))
            if same:
                self.pair(line, same.pop())

    def pair_unique(self, old: list[_Line], new: list[_Line]) -> None:
        """Pair the operations that no other one reads like, as those of a weight, and `return`."""
        counts = [Counter(line.key for line in lines) for lines in (old, new)]
        by_key = {line.key: line for line in old}
        for line in new:
            if all(counted[line.key] == 1 for counted in counts):
                self.pair(line, by_key[line.key])

    def pair_blocks(self, old: list[_Line], new: list[_Line]) -> None:
        """Pair operations that follow one another in both functions."""
        keys = [line.key for line in old], [line.key for line in new]
        for at, new_at, size in difflib.SequenceMatcher(None, *keys).get_matching_blocks():
            for place in range(size if size > 1 else 0):
                self.pair(new[new_at + place], old[at + place])

    def pair_used(self) -> None:
        """Pair values that paired operations use in the same place, from the last to the first.

        Of several old values, as those of equal operations that became one, the first is taken.
        """
        for line in [line for line in reversed(self.new.lines) if line not in self.pairs]:
            for name in line.results:
                free = [old for old in self.used_for(name) if old not in self.taken]
                if not free:
                    continue
                old_name = min(free, key=lambda old: self.old.places.get(old, -1))
                producer = self.old.producers.get(old_name)
                if producer is not None and self.alike(line, producer):
                    self.pair(line, producer)
                self.give(name, old_name)

    def used_for(self, name: str) -> Iterator[str]:
        """The old values in the places where paired operations use a value."""
        for line, place in self.new.uses.get(name, ()):
            operands = self.pairs[line].operands if line in self.pairs else ()
            yield from operands[place : place + 1]

    def alike(self, new: _Line, old: _Line) -> bool:
        """Whether two lines may be paired: the same operation, not paired otherwise."""
        same = new.opname == old.opname and len(new.results) == len(old.results)
        return same and new not in self.pairs and old not in self.paired

    def unpaired(self, side: _Lines) -> list[_Line]:
        return [line for line in side.lines if line not in self.pairs and line not in self.paired]

    def pair(self, new: _Line, old: _Line) -> None:
        self.pairs[new] = old
        self.paired.add(old)
        for name, old_name in zip(new.results, old.results, strict=True):
            self.give(name, old_name)

    def give(self, name: str, old_name: str) -> None:
        """Give a value the name of an old one, unless it has a name, or another value has that."""
        if name not in self.names and old_name not in self.taken:
            self.names[name] = old_name
            self.taken.add(old_name)
