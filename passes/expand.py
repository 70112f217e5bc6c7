"""`expand`: replaces composite operations by their expansions."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Module, Op
from irc.ir.declare import op_class
from irc.ops import MoeCombine, MoeDispatch
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, replace


@register("expand")
class Expand(Pass):
    """Replaces composite operations by their expansions: those in `ops`, or all of them.

    Expansions are expanded in turn, until none of the requested operations is left. moe_dispatch
    and moe_combine stay where there are several ranks: their rules say which tokens a rank has,
    which the rules of their expansions cannot. Backends expand them as they emit them.
    """

    ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.ops:
            if not op_class(name).composite:
                raise Error(f"{name} is not composite, so it has no expansion")

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for op in function:
                self._expand(op, stats, module.mesh.ranks > 1)

    def _expand(self, op: Op, stats: Stats, several: bool) -> None:
        work = [op]
        while work:
            op = work.pop()
            if not op.composite or (self.ops and op.opname not in self.ops):
                continue
            if several and isinstance(op, (MoeDispatch, MoeCombine)):
                if self.ops:
                    raise Error(
                        f"{op.opname} stays composite where there are several ranks, since no "
                        "rules of simpler operations say which tokens each has; leave it out",
                        op,
                    )
                continue
            if not permit(f"expand {op.opname}", op):
                return
            try:
                work += reversed(replace(op, op.expand()))
            except Error as error:
                raise Error(f"the expansion of {op.opname} {error.message}", op) from error
            stats.count(op.opname)
