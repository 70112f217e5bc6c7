"""Names in an ONNX graph: missing, duplicate and unordered values, cycles."""

import pytest

from irc.onnx_format.files import Wires, Wiring, leaves_folder, wiring
from tests.fresh import fresh

FINE = Wiring((), (), (), False)


def wires(*texts: str) -> list[Wires]:
    """Nodes as "a b -> c"."""
    halves = [text.split("->") for text in texts]
    return [(takes.split(), makes.split()) for takes, makes in halves]


@pytest.mark.parametrize(
    ("inputs", "nodes", "faults"),
    [
        ("x w", ["x w -> a", "a a -> b c", "c -> d"], FINE),
        (
            "x",
            ["x lost -> a", "a gone gone -> b"],
            Wiring(((0, "lost"), (1, "gone")), (), (), False),
        ),
        ("x x", [], Wiring((), ((-1, "x"),), (), False)),
        ("x", ["x -> a", "x -> a"], Wiring((), ((1, "a"),), (), False)),
        ("x", ["x -> x"], Wiring((), ((0, "x"),), (), False)),
        ("x", ["x -> a a"], Wiring((), ((0, "a"),), (), False)),
        ("x", ["a -> b", "x -> a"], Wiring((), (), (), True)),
        ("x", ["x a -> a"], Wiring((), (), ("a",), True)),
    ],
)
def test_faults(inputs: str, nodes: list[str], faults: Wiring) -> None:
    assert wiring(inputs.split(), wires(*nodes)) == faults


def test_absent_operands_are_none() -> None:
    assert wiring(["x"], [(["x", ""], ["a", ""]), (["", "a"], ["b", ""])]) == FINE


def test_random_cycles_are_cycles() -> None:
    rng = fresh(77)
    for _ in range(200):
        count = int(rng.integers(1, 9))
        nodes: list[Wires] = [
            ([f"v{int(rng.integers(-1, count))}" for _ in range(int(rng.integers(3)))], [f"v{i}"])
            for i in range(count)
        ]
        found = wiring(["v-1"], nodes)
        for before, after in zip(found.cycle, [*found.cycle[1:], *found.cycle[:1]], strict=True):
            maker = next(inputs for inputs, outputs in nodes if after in outputs)
            assert before in maker
        assert bool(found.cycle) == (not sortable(nodes))


def sortable(nodes: list[Wires]) -> bool:
    """Whether the nodes can run one after the other."""
    known, left = {"v-1"}, list(nodes)
    while left:
        ready = [each for each in left if known.issuperset(each[0])]
        if not ready:
            return False
        known.update(name for _, outputs in ready for name in outputs)
        left = [each for each in left if each not in ready]
    return True


@pytest.mark.parametrize(
    ("location", "outside"),
    [("a.bin", False), ("a/b..c", False), ("../a", True), ("a/../../b", True), ("/a", True)],
)
def test_locations(location: str, outside: bool) -> None:
    assert leaves_folder(location) == outside
