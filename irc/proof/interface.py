"""What callers see of two modules: arguments, results, states, dims and the mesh."""

from __future__ import annotations

from .graph import Graph


def interface(a: Graph, b: Graph) -> tuple[list[str], list[str]]:
    """Why callers of A cannot call B in its place, and other layouts of its results."""
    reasons: list[str] = []

    def same(what: str, before: object, after: object) -> None:
        if before != after:
            reasons.append(f"{what}: {after or 'none'} instead of {before or 'none'}")

    same("the arguments differ", ", ".join(a.arguments), ", ".join(b.arguments))
    same("the results differ", ", ".join(a.results), ", ".join(b.results))
    dims = a.module.dims, b.module.dims
    for name in dict.fromkeys([*dims[0], *dims[1]]):
        before, after = (f"{d[name][0]} to {d[name][2]}" if name in d else "" for d in dims)
        same(f"the range of {name} differs", before, after)
    if a.module.mesh.ranks > 1:
        same("the mesh differs", str(a.module.mesh), str(b.module.mesh))
    aliases = a.states(), b.states()
    for name in a.results:
        same(f"what {name} aliases differs", *[names.get(name, "") for names in aliases])
    notes: list[str] = []
    for name in a.results.keys() & b.results.keys():
        types = [graph.results[name].type.global_type for graph in (a, b)]
        if types[0].axes != types[1].axes:
            notes.append(f"the result {name} is distributed as {types[1]} instead of {types[0]}")
        elif types[0].shape != types[1].shape:
            notes.append(f"the result {name} is {types[1]} instead of {types[0]}")
    return reasons, sorted(notes)
