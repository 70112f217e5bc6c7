"""`shard`: shards a module over the ranks of a mesh, by a plan and propagation."""

from __future__ import annotations

from dataclasses import replace

from irc.analysis.stages import PIPELINE, stage_of
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline import Compilation, Pass, Stats, option, register
from irc.pipeline.options import PATHS

from .make_divisible import make_divisible
from .pad_blocks import pad_blocks, smaller_blocks
from .pad_heads import pad_heads
from .place import grouped, place, share_of_weights
from .plan import DEFAULT, Plan, plan_of
from .segments import cut_segments
from .solve import Solver


@register("shard")
class ShardModule(Pass):
    """Splits weights over the mesh by a plan; the sharding rules of the operations do the rest.

    `plan` is auto, or the path of a file of rows such as `*.fc.weight 0@tp`, or of JSON with a
    Hugging Face tp_plan. `auto` chooses by the operations around each weight and by the cost of
    collectives. Sums that are partial where a complete value is needed are completed by an
    all_reduce, with `sequence` by a reduce_scatter over the tokens and an all_gather later. No
    head is split: where heads do not divide they are padded or replicated, whichever costs less.
    The batch is sharded over dp.
    """

    view = "unsharded"

    mesh: str = ""
    plan: str = option(
        default=DEFAULT,
        help="how weights are sharded: rows such as *.fc.weight 0@tp, or a tp_plan in JSON",
        metavar="FILE",
        takes=PATHS,
        one_rank="holds all weights",
    )
    sequence: bool = option(
        default=False,
        help="shard activations over tokens between blocks",
        one_rank="has all tokens",
    )

    def configured(self, compilation: Compilation) -> Pass | None:
        if compilation.is_sharded:
            return None
        plan = plan_of(compilation) or self.plan
        sequence = compilation.options.get("sequence", self.sequence)
        return replace(self, mesh=str(compilation.module.mesh), plan=plan, sequence=sequence)

    def run(self, module: Module, stats: Stats) -> None:
        self._check(module)
        changes = Stats()
        if self.mesh:
            module.mesh = _merged(module.mesh, Mesh.parse(self.mesh))
        plan = Plan.of(self.plan, module, changes)
        if all(size == 1 for axis, size in module.mesh.axes if axis != PIPELINE):
            return
        cut_segments(plan)
        pad_heads(plan)
        pad_blocks(plan)
        smaller_blocks(plan)
        placement = place(plan)
        make_divisible(module, changes, self.sequence)
        for function in module.functions.values():
            Solver(module, function, placement, changes, self.sequence).run()
        changes.summary = share_of_weights(plan)
        changes.notes = grouped(changes.notes)
        stats.update(changes)

    def _check(self, module: Module) -> None:
        if module.local:
            raise Error("the module is in the local view already; shard comes before localize")
        if any(value.type.sharded for op in module.ops() for value in op.results):
            raise Error("the module is sharded already; shard an unsharded one")
        if any(stage_of(op) >= 0 for op in module.ops()):
            raise Error("the module is divided into stages already; put shard before pipeline")
        if any(op.opname == "call" for op in module.ops()):
            raise Error("shard follows values through one function; put inline before it")


def _merged(mesh: Mesh, asked: Mesh) -> Mesh:
    """The requested mesh; an Error where the module has another."""
    if mesh.axes and mesh != asked:
        raise Error(f"the module is for the mesh ({mesh}), but shard has the mesh ({asked})")
    return asked
