"""`irc prove`: whether a module computes what another does, or every pass of an artifact.

Operations are proved by rules, or supported by random inputs. These show no rounding, NaN or
infinity, and not every branch for rare numbers.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ..report import Report, Table
from .arguments import Usage, add_json
from .console import answer
from .sources import read_module, weights_folder

if TYPE_CHECKING:
    from ..proof import Certificate

DRAWS = "random inputs per region (default: 3); they show no rounding, NaN and rare constants"
EXAMPLES = """
  irc prove before.irc after.irc          are the results of the second those of the first?
  irc prove build/llama                   every pass of an artifact
  irc opt model.irc --passes "cse, dce" --dump-dir dumps > out.irc && irc prove dumps
  irc prove a.irc b.irc --draws 10 --seed 7 --json
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc prove`."""
    add = parser.add_argument
    what = "a module, script or artifact folder; alone: an artifact or a folder of --dump-dir"
    add("before", metavar="A", help=what)
    add("after", metavar="B", nargs="?", help="a module that should compute what A computes")
    add("--draws", metavar="N", type=int, default=3, help=DRAWS)
    add("--seed", metavar="N", type=int, default=0, help="the seed of random inputs (default: 0)")
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if everything is certified, 1 if not."""
    from ..proof.certify import prove_passes, report
    from ..proof.prove import prove

    if args.draws < 1 or args.seed < 0:
        raise Usage("expected --draws of at least 1 and --seed of at least 0")
    if args.after is None:
        from ..driver.history import replay

        history = replay(args.before, args.load)
        return answer(args, report(prove_passes(history, draws=args.draws, seed=args.seed)))
    a, b = read_module(args.before), read_module(args.after)
    bases = [str(weights_folder(place)) for place in (args.before, args.after)]
    certificate = prove(a, b, draws=args.draws, seed=args.seed, base=bases[0], other_base=bases[1])
    return answer(args, _report(certificate))


def _report(certificate: Certificate) -> Report:
    """What is proved, supported and neither, with the evidence."""
    from ..proof.certify import explained

    text: list[str | Table] = [str(certificate), *explained(certificate)]
    text += [f"identity: {name}, {count} times" for name, count in certificate.identities.items()]
    text += certificate.notes
    columns = {
        "supported by numbers": "{value} {scope}",
        "regions": "{count}",
        "operations": "{operations}",
        "in": "{dtype}",
        "within": "{tolerance:g}",
        "": "{note}",
    }
    facts = certificate.facts()
    text += [Table(facts["evidence"], columns)] if facts["evidence"] else []
    return Report(facts, text, int(not certificate.certified))
