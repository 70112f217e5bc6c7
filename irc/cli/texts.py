"""Texts and prompts of commands: from the command line, from files, and from standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..argument_checks import whole_number_in
from ..errors import Error
from ..files import open_file
from .ranks import shared

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator


def read_text(path: str, what: str = "") -> str:
    """The text of a file, or where it is `-`, of standard input; `what` it is, for messages."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open_file(path) as file:
                data = file.read()
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    return decoded(data, what or ("standard input" if path == "-" else path))


def decoded(data: bytes, what: str) -> str:
    """The text of bytes in UTF-8; an Error about `what` otherwise."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"{what} is not text in UTF-8 (byte {error.start} is wrong)") from None


def given_text(option: str, what: str) -> str:
    """A text on the command line; `-` is standard input without the newline that ends it."""
    if option == "-":
        return read_text(option, what).removesuffix("\n")
    return decoded(option.encode("utf-8", "surrogateescape"), what)


def read_lines(path: str, **kinds: type) -> list[Any]:
    """The texts of a file, one a line; of a .jsonl file, the values of these keys and types.

    An object on a line has one of the keys, such as "prompt" with a text.
    """
    numbered = enumerate(read_text(path).split("\n"), 1)
    lines = {at: line.removesuffix("\r") for at, line in numbered if line.strip()}
    if not lines:
        raise Error(f"{path} has no text; expected one a line")
    if not path.endswith(".jsonl"):
        return [*lines.values()]
    return [_value(line, f"line {at} of {path}", kinds) for at, line in lines.items()]


def _value(line: str, place: str, kinds: Mapping[str, type]) -> Any:
    try:
        entry = cast("dict[str, Any]", json.loads(line))
    except (ValueError, RecursionError) as error:
        raise Error(f"{place} is not JSON: {error}") from None
    for key, kind in kinds.items():
        if type(entry) is dict and isinstance(entry.get(key), kind):
            return entry[key]
    wanted = " or ".join(f'"{key}" ({kind.__name__})' for key, kind in kinds.items())
    raise Error(f"{place}: expected an object that has {wanted}")


def shared_json(communicator: Communicator | None, read: Callable[[], Any]) -> Any:
    """What rank 0 reads, a value of JSON, on every rank."""

    def arrays() -> dict[str, Any]:
        return {"json": np.frombuffer(json.dumps(read()).encode(), np.uint8)}

    return json.loads(shared(communicator, arrays)["json"].tobytes())


def parse_ids(text: str) -> list[int]:
    """Token ids from a text such as `1 15043, 29892`."""
    ids: list[int] = []
    for word in text.replace(",", " ").split():
        if (token := whole_number_in(word)) is None:
            raise Error(f"with --raw-ids the prompt is numbers such as 1 15043, not {word!r}")
        ids.append(token)
    return ids
