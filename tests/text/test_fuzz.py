"""Mutated IR texts are parsed and rewritten: any outcome but a module or an Error is a failure."""

import random
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from types import FrameType

import irc.passes
from irc.errors import Error
from irc.frontends.script import load_script
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.pipeline import run_pipeline
from irc.text import parse_module, print_module
from irc.text.cursor import tokenize
from tests.fresh import fresh
from tests.layout import ROOT
from tests.ops.example import module_of
from tests.ops.examples import EXAMPLES
from tests.random_modules import random_module

assert irc.passes  # importing it registers the passes
SECONDS = 2  # CPU time to read one text of a few kilobytes
PASSES = (
    "inline, canonicalize, cse, fuse-gated-mlp, fuse-qkv, fuse-linears, fuse-norm, "
    "fold, expand, dce"
)
SPLICES = (*("", " ", "\n", "//", "\x00"), *'"{}[]%@-é', "9" * 40, "(" * 50)
VALUES = (
    *("0", "1", "-1", "2", "3", "17", "0.5", "-0.0", "1e-320", "1e300", "inf", "-inf", "nan"),
    *("9223372036854775807", "-9223372036854775808", "99999999999999999", "S", "2*S + 1", "-S"),
    *("true", "false", "none", '"tp"', '"sum"', '"i4"', '"f8e4m3"', '"\\ud800"', "[[1]]", "@f"),
)


def corpus(rng: random.Random) -> list[list[str]]:
    """Random modules, every operation, and models. A mutation chooses a group, then a text."""
    return [
        [print_module(random_module(rng.randrange(10**9)), locs=True) for _ in range(200)],
        [
            print_module(module_of(example, example.dtypes[0]))
            for examples in EXAMPLES.values()
            for example in examples
        ],
        models(),
    ]


def models() -> list[str]:
    """The example scripts as they are traced, and after fusions that change their weights."""
    texts: list[str] = []
    for path, settings in (("llama.py", {"layers": "1"}), ("two_tower.py", {})):
        module = load_script(str(ROOT / "examples" / path), settings)
        texts.append(print_module(module, locs=True))
        run_pipeline(module, "fuse-gated-mlp, fuse-qkv, fuse-norm")
        texts.append(print_module(module))
    return texts


class Hang(Exception):
    """Reading one text took longer than SECONDS."""


def mutate(rng: random.Random, text: str, other: str) -> str:
    """`text` with one to four random edits of characters, tokens or lines."""
    for _ in range(rng.randint(1, 4)):
        kinds = (_characters, _tokens, _lines, _numbers, _attributes)
        text = rng.choice(kinds)(rng, text, other)
    return text


def _characters(rng: random.Random, text: str, other: str) -> str:
    at = rng.randrange(len(text) + 1)
    end = min(len(text), at + rng.choice((0, 1, 1, 5, 60)))
    return text[:at] + rng.choice((*SPLICES, chr(rng.randrange(32, 127)))) + text[end:]


def _tokens(rng: random.Random, text: str, other: str) -> str:
    """Replace one token by another of the same or of another text."""
    here, there = tokenize(text)[:-2], tokenize(other)[:-2]
    if not here or not there:
        return text
    old, new = rng.choice(here), rng.choice((rng.choice(here), rng.choice(there)))
    at = text.find(old, rng.randrange(len(text)))
    return text if at < 0 else text[:at] + new + text[at + len(old) :]


def _lines(rng: random.Random, text: str, other: str) -> str:
    lines = text.splitlines(True)
    donor = rng.choice((lines, other.splitlines(True)))
    if not lines or not donor:
        return text
    at = rng.randrange(len(lines))
    end, new = rng.choice(((at + 1, []), (at, [rng.choice(donor)]), (at + 1, [rng.choice(donor)])))
    lines[at:end] = new
    return "".join(lines)


def _numbers(rng: random.Random, text: str, other: str) -> str:
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    if not digits:
        return text
    at = rng.choice(digits)
    number = rng.choice(("0", "1", "-1", "2", "7", "65536", "1e9", "S", "B*S"))
    return text[:at] + number + text[at + 1 :]


def _attributes(rng: random.Random, text: str, other: str) -> str:
    """Give one attribute another value."""
    places = list(re.finditer(r"(?<=\w=)(?:\[[^]]*\]|[^\s,}\])]+)", text))
    if not places:
        return text
    old = rng.choice(places)
    new = rng.choice(VALUES)
    if old[0][0] == "[" and rng.random() < 0.8:
        new = f"[{', '.join(rng.choice(VALUES) for _ in range(rng.randint(0, 4)))}]"
    return text[: old.start()] + new + text[old.end() :]


def read(text: str) -> str:
    """Parse, verify, rewrite, print and parse again; returns the name of the outcome."""
    try:
        module = parse_module(text)
        verify(module)
    except Error as error:
        if not str(error):
            raise AssertionError("an Error without a message") from error
        return "refused"
    _check_round_trip(module)
    try:
        run_pipeline(module, PASSES)
    except Error as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, Error):
            raise
        return "not rewritten"
    _check_round_trip(module)
    return "read"


def _check_round_trip(module: Module) -> None:
    printed = print_module(module, locs=True)
    printed.encode()
    again = parse_module(printed)
    verify(again)
    if print_module(again, locs=True) != printed:
        raise AssertionError("the text does not survive a round trip")


def fuzz(count: int, seed: int) -> Counter[str]:
    """Run `count` mutations; returns outcomes, and prints any failure with its text."""
    rng = random.Random(seed)
    groups = corpus(rng)
    outcomes: Counter[str] = Counter()
    signal.signal(signal.SIGPROF, _alarm)  # CPU time: the machine may be busy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(count):
            text = mutate(rng, *(rng.choice(rng.choice(groups)) for _ in range(2)))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                outcomes[read(text)] += 1
            except Exception:
                outcomes["failed"] += 1
                print(f"--- seed {seed}\n{text}\n{traceback.format_exc()}", file=sys.stderr)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return outcomes


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"reading took more than {SECONDS} s")


def test_mutated_texts_are_read_or_refused() -> None:
    seed = int(fresh(50).integers(10**9))
    outcomes = fuzz(3000, seed)
    assert outcomes["failed"] == 0, f"seed {seed}"
    assert outcomes["read"] > 30 and outcomes["refused"] > 1000
