"""Mutate IR texts and read them: every outcome but a module or an Error is a failure.

python -m tests.fuzz.mutate_text --count 200000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback
from collections import Counter
from types import FrameType

from irc.errors import Error
from irc.text import parse_module, print_module
from irc.text.tokens import tokenize
from irc.verify import verify
from tests.random_modules import random_module

SECONDS = 2  # one text of a few kilobytes must be read in well under this
SPLICES = (
    "",
    " ",
    "\n",
    '"',
    "{",
    "}",
    "[",
    "]",
    "%",
    "@",
    "-",
    "9" * 40,
    "(" * 50,
    "\x00",
    "é",
    "//",
)


class Hang(Exception):
    """Reading one text took longer than SECONDS."""


def mutate(rng: random.Random, text: str, other: str) -> str:
    """`text` with one to four random edits of characters, tokens or lines."""
    for _ in range(rng.randint(1, 4)):
        text = rng.choice((_characters, _tokens, _lines, _numbers))(rng, text, other)
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
    action = rng.randrange(3)
    if action == 0:
        del lines[at]
    elif action == 1:
        lines.insert(at, rng.choice(donor))
    else:
        lines[at] = rng.choice(donor)
    return "".join(lines)


def _numbers(rng: random.Random, text: str, other: str) -> str:
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    if not digits:
        return text
    at = rng.choice(digits)
    return (
        text[:at]
        + rng.choice(("0", "1", "-1", "2", "7", "65536", "1e9", "S", "B*S"))
        + text[at + 1 :]
    )


def read(text: str) -> str:
    """Parse, verify, print, and read what was printed; the name of the outcome."""
    try:
        module = parse_module(text)
        verify(module)
    except Error as error:
        if not str(error):
            raise AssertionError("an Error without a message") from error
        return "refused"
    printed = print_module(module, locs=True)
    if print_module(parse_module(printed), locs=True) != printed:
        raise AssertionError("the text does not survive a round trip")
    return "read"


def fuzz(count: int, seed: int) -> Counter[str]:
    """Run `count` mutations; returns outcomes, and prints any failure with its text."""
    rng = random.Random(seed)
    corpus = [print_module(random_module(rng.randrange(10**9)), locs=True) for _ in range(200)]
    outcomes: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _alarm)
    for _ in range(count):
        text = mutate(rng, rng.choice(corpus), rng.choice(corpus))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            outcomes[read(text)] += 1
        except Exception:
            outcomes["failed"] += 1
            print(f"--- seed {seed}\n{text}\n{traceback.format_exc()}", file=sys.stderr)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return outcomes


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"reading took more than {SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    options = parser.parse_args()
    start = time.perf_counter()
    outcomes = fuzz(options.count, options.seed)
    seconds = time.perf_counter() - start
    print(f"seed {options.seed}: {dict(outcomes)} in {seconds:.0f} s")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
