"""`certify`: a certificate of every pass of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..pipeline.base import PASSES
from ..pipeline.instruments.history import History
from ..report import Report, Table
from ..text import parse_module
from .certificate import ORDER, Certificate
from .prove import DRAWS, prove

PROVED = ("unchanged", "certified")  # the status of passes that keep what is computed


@dataclass(frozen=True)
class PassProof:
    """The certificate of one pass; None where it did not change the text."""

    index: int
    pass_: str
    name: str
    certificate: Certificate | None

    @property
    def status(self) -> str:
        """`unchanged`, `certified`, `changes numbers by design` or `not certified`."""
        if self.certificate is None or self.certificate.certified:
            return "unchanged" if self.certificate is None else "certified"
        by_design = PASSES[self.name].changes_numbers
        return "changes numbers by design" if by_design else "not certified"


def prove_passes(
    history: History, *, draws: int = DRAWS, seed: int = 0, base: str = ""
) -> list[PassProof]:
    """A proof of every pass: of the module after it beside the one before it."""
    proofs: list[PassProof] = []
    before = history.input
    for after in history.steps:
        certificate = None
        if after.text != before.text:
            a, b = parse_module(before.text), parse_module(after.text)
            certificate = prove(a, b, draws=draws, seed=seed, base=base)
        proofs.append(PassProof(after.index, after.pass_, after.name, certificate))
        before = after
    return proofs


def certify(history: History, **options: Any) -> dict[str, Any]:
    """The facts of `certificate.json`, by the options of `prove_passes`; the same each time."""
    return facts(prove_passes(history, **options))


def facts(proofs: Sequence[PassProof]) -> dict[str, Any]:
    """The facts of some proofs, for JSON; `certified` where every pass is."""
    passes = [
        {"index": proof.index, "pass": proof.pass_, "status": proof.status}
        | ({} if proof.certificate is None else proof.certificate.facts())
        for proof in proofs
    ]
    others = [proof.name for proof in proofs if proof.status not in PROVED]
    return {"certified": not others, "not_certified": others, "passes": passes}


def report(proofs: Sequence[PassProof]) -> Report:
    """A row per pass, then what is not certified."""
    rows: list[dict[str, Any]] = []
    lines: list[str | Table] = []
    for proof in proofs:
        certificate = proof.certificate or Certificate()
        row = {"index": proof.index, "name": proof.name, "status": proof.status}
        rows.append(row | certificate.counts)
        if proof.certificate is not None and not certificate.certified:
            lines += ["", f"{proof.index} {proof.name}: {proof.status}", *explained(certificate)]
    columns = {"": "{index}", "pass": "{name}", "status": "{status}"}
    columns |= {status: f"{{{status}}}" for status in ORDER}
    written = facts(proofs)
    return Report(written, [Table(rows, columns), *lines], int(not written["certified"]))


def explained(certificate: Certificate) -> list[str]:
    """Why a certificate does not certify, a line each."""
    lines = [f"  {reason}" for reason in certificate.reasons]
    difference = certificate.difference
    return [*lines, f"  the first that differs is {difference}"] if difference else lines
