"""What a rank runs step by step: operations, launches, their names, times and sources."""

import pytest

from irc.analysis.forecast import phase, stage_transfers
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.steps import Step
from irc.analysis.topology_file import default_topology
from irc.backends import get
from irc.ir.core import Module
from irc.text.printer import names_of
from tests.analysis.test_forecast import EVEN, SIZES, prepared

TOPOLOGY = default_topology()
MESHES = [("tp=1", 0), ("tp=3", 0), ("pp=3, tp=2", 3)]


def steps(module: Module, backend: str) -> tuple[list[Step], LocalSizes]:
    sizes = LocalSizes(module.mesh, typical_sizes(module, **SIZES))
    return [*get(backend).commands.steps(module, sizes, TOPOLOGY)], sizes


@pytest.mark.parametrize(("mesh", "stages"), MESHES)
def test_operations_add_up_to_the_forecast(mesh: str, stages: int) -> None:
    module = prepared(EVEN, mesh, stages=stages)
    found, sizes = steps(module, "onnx")
    sent = sum(message.us for message in stage_transfers(module, sizes, TOPOLOGY))
    assert sum(s.us for s in found) + sent == pytest.approx(
        phase("run", module, sizes, TOPOLOGY).us
    )
    assert {step.rank for step in found} == {rank * 2 for rank in range(max(stages, 1))}
    assert any(step.operation == "all_reduce" for step in found) == (mesh != "tp=1")


@pytest.mark.parametrize(("mesh", "stages"), MESHES)
def test_launches_name_the_values_of_the_text(mesh: str, stages: int) -> None:
    """Of the text of the module, not of the one that plans are made from."""
    module = prepared(EVEN, mesh, stages=stages)
    found, _ = steps(module, "cuda")
    makers = {
        (function.name, name): value.producer
        for function in module.functions.values()
        for value, name in names_of(function).items()
    }
    known = {name for _, name in makers}
    scopes = {op.loc.scope for op in module.ops() if op.loc is not None}
    launches = [step for step in found if step.source]
    assert launches and all(f"{step.name}(" in step.source for step in launches)
    for step in found:
        assert {*step.values} <= known
        assert step.scope in scopes and step.where.endswith(step.scope)
    assert any(step.operation == "linear" for step in found if step.scope == "lm_head")
    assert not any(step.operation == "ge" for step in found)
    computed = {name for step in found for name in step.values}
    products = [n for (_, n), op in makers.items() if op is not None and op.opname == "linear"]
    assert {*products} <= computed
