"""Every mutant of a local module has the same results, or the verifier refuses it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.text import parse_module
from tests.analysis.layout_mutants import OWN, Sample, mutants, samples
from tests.fresh import session_seed
from tests.sharded.checking import check

COUNT = 12  # samples of a session
EACH = 40  # mutants of a sample


def outcome(sample: Sample, what: str, module: Module) -> str:
    """`refused` or `equal`; an AssertionError where accepted results are wrong.

    Other exchanges of what the ranks have of their own are `another` program.
    """
    try:
        verify(module)
    except Error as error:
        assert error.op is None or error.op.loc is None or ".py:" in str(error), error
        return "refused"
    try:
        check(module, sample.inputs, sample.wanted, f"{sample.name}: {what}", sample.tolerance)
    except (AssertionError, Error):
        if not what.startswith(OWN):
            raise
        return "another"
    return "equal"


def test_mutants_are_equal_or_refused(tmp_path: Path) -> None:
    rng = random.Random(session_seed())
    counts: Counter[str] = Counter()
    for sample in samples(rng, tmp_path, COUNT):
        verify(parse_module(sample.text))
        for at, (what, module) in enumerate(mutants(sample, rng)):
            if at == EACH:
                break
            counts[outcome(sample, what, module)] += 1
    assert counts["refused"] > max(COUNT, 2 * counts["another"]), counts
