"""Proofs of passes: their shares, wrong variants that must not be certified, and times.

    python -m benchmarks.proof [--variants 300] [--seed N] [--llama 8b]

Tiny Llama, Mixtral, BERT and DLRM over three meshes. A variant is one change of the output of a
pass that still verifies; it is wrong where evaluations of the whole module differ. `--llama` times
the proofs of a Llama of real sizes over the mesh tp=4, by its config.json alone.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections import Counter

import numpy as np

import irc
from benchmarks.checkpoints import config
from irc.driver.history import history_of
from irc.frontends import random_weights
from irc.frontends.models import find_family
from irc.ir.mesh import Mesh
from irc.proof import prove, prove_passes
from irc.proof.certificate import ORDER
from irc.report import table
from tests.proof.models import MESHES, MODELS, PASSES, history
from tests.proof.mutants import chosen, differs, mutants


def shares() -> None:
    """A row per model and mesh: operations after all passes that changed something."""
    rows: list[list[str]] = []
    for name in MODELS:
        for mesh in MESHES:
            start = time.perf_counter()
            found = [p.certificate for p in prove_passes(history(name, mesh)) if p.certificate]
            seconds = time.perf_counter() - start
            counts = Counter[str]()
            for certificate in found:
                counts.update(certificate.counts)
            total = sum(counts.values())
            cells = [f"{counts[status] / total:.1%}" for status in ORDER]
            certified = f"{sum(one.certified for one in found)} of {len(found)}"
            rows.append([name, mesh, certified, str(total), *cells, f"{seconds:.1f} s"])
    print(table(rows, ["model", "mesh", "certified", "operations", *ORDER, "time"]))


def variants(count: int, seed: int) -> None:
    """Certified and refused ones of wrong variants, and of those that evaluations find equal."""
    rng = np.random.default_rng(seed)
    found = Counter[tuple[str, str]]()
    while sum(n for (kind, _), n in found.items() if kind == "wrong") < count:
        name, mesh = chosen(rng, [*MODELS]), chosen(rng, MESHES)
        records = history(name, mesh).records
        at = chosen(
            rng, [i for i in range(1, len(records)) if records[i].text != records[i - 1].text]
        )
        before, right = irc.parse(records[at - 1].text), irc.parse(records[at].text)
        what, wrong = next(mutants(records[at].text, rng))
        kind = "wrong" if differs(right, wrong, rng) else "equal"
        certificate = prove(before, wrong)
        found[kind, "certified" if certificate.certified else "refused"] += 1
        if certificate.certified and kind == "wrong":
            print(f"certified: {name} {mesh} {records[at].name}: {what}")
    print(f"seed {seed}: {dict(found)}")


def llama(shape: str) -> None:
    """The time of every pass over a Llama of real sizes."""
    values = config(shape, "bf16")
    family = find_family(values)
    module = random_weights(family.trace(family.read_config(values), "bf16"), 0)
    module.mesh = Mesh.parse("tp=4")
    history = history_of(module, PASSES)
    start = time.perf_counter()
    for proof in prove_passes(history):
        counts = proof.certificate.counts if proof.certificate else {}
        print(proof.index, proof.name, proof.status, dict(counts))
        for one in proof.certificate.evidence if proof.certificate else ():
            print("   ", one.value, one.scope, one.operations, f"x {one.count}")
    print(f"{time.perf_counter() - start:.1f} s")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--llama", default="")
    args = parser.parse_args()
    if args.llama:
        llama(args.llama)
        return
    shares()
    variants(args.variants, args.seed)


if __name__ == "__main__":
    main()
