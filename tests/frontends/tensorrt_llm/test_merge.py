"""The networks of all ranks, joined: numbers and arrays by rank, pipeline stages, caches."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import functional as F
from irc.frontends.tensor import one
from irc.frontends.tensorrt_llm import Network, Parameter, Tensor, default_net, merge, net_guard
from irc.frontends.tensorrt_llm.arithmetic import binary, unwrapped
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.engines import merged
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import constant_tensor
from irc.frontends.tensorrt_llm.tensor import wrap
from irc.ir.verify import verify
from irc.weights import UnboundRef, ZerosRef
from tests.fresh import fresh

from .worlds import Bound, run, shard, source, trace

T = Bound("functional")


def linear(x: Tensor, weight: Parameter) -> Tensor:
    return wrap(F.linear(unwrapped(x), unwrapped(weight.value)))


def gathered(x: Tensor, axis: str, size: int) -> Tensor:
    """The values of all ranks, one after the other in a new first dimension."""
    tall = wrap(F.unsqueeze(unwrapped(x), dims=(0,)))
    return wrap(F.all_gather(unwrapped(tall), axis=axis, dim=0, group_size=size))


class Mlp:
    """A feed-forward per layer, as a script with raw calls writes it: column, then row parallel."""

    def __init__(self, layers: int = 2, hidden: int = 5, inner: int = 12) -> None:
        random = fresh()
        self.up = random.normal(size=(layers, inner, hidden)).astype(np.float32)
        self.down = random.normal(size=(layers, hidden, inner)).astype(np.float32)
        self.bias = random.normal(size=(layers, hidden)).astype(np.float32)

    def __call__(self, m: Mapping) -> None:
        if m.is_first_pp_rank():
            x = source(size=5)
        else:
            x = T.recv(source("hidden_states_input", 5), m.prev_pp_rank())
        for i in m.pp_layers(len(self.up)):
            y = T.relu(T.matmul(x, Parameter(shard(self.up[i], 0, m)).value, transb=True))
            y = T.matmul(y, Parameter(shard(self.down[i], 1, m)).value, transb=True)
            y = T.allreduce(y, m.tp_group) if m.tp_size > 1 else y
            x = x + y + Parameter(self.bias[i]).value
        if m.is_last_pp_rank():
            x.mark_output("y", "float32")
            return
        x = T.send(x, m.next_pp_rank())
        x.mark_output("hidden_states_output", "float32")

    def oracle(self, x: np.ndarray) -> np.ndarray:
        for up, down, bias in zip(self.up, self.down, self.bias, strict=True):
            x = x + np.maximum(x @ up.T, 0) @ down.T + bias
        return x


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3)])
def test_tensor_and_pipeline_parallel_scripts(tp: int, pp: int) -> None:
    model, x = Mlp(3), fresh().normal(size=(3, 5)).astype(np.float32)
    assert np.allclose(run(model, {"x": x}, tp, pp)["y"], model.oracle(x), atol=1e-3)


def test_the_merged_module_compiles_and_runs(tmp_path: Path) -> None:
    model, x = Mlp(), fresh().normal(size=(2, 5)).astype(np.float32)
    with new_session():
        module = trace(model, 2, 2)
        assert module.local and str(module.mesh) == "pp=2, tp=2"
        assert list(module.functions) == ["stage0", "stage1", "forward"]
        assert module.dims == {"b": (1, 2, 5)}
        artifact = irc.compile(module, tmp_path / "out", bundle=True)
    assert np.allclose(artifact.run({"x": x})["y"], model.oracle(x), atol=1e-3)


def test_a_lost_collective_of_a_script_is_refused() -> None:
    with new_session():
        module = trace(Mlp(1), 2)
    verify(module)
    (total,) = [op for op in module.ops() if op.opname == "all_reduce"]
    total.result.replace_by(total.operands[0])
    total.erase()
    with pytest.raises(irc.Error, match=r"result of \w+ is f32.*but it makes f32.*varies tp"):
        verify(module)


def test_equal_arrays_are_stored_once() -> None:
    with new_session():
        weights = trace(Mlp(1), 2).weights
    kept = [str(weight.ref) for weight in weights.values()]
    assert sum("shard" in text for text in kept) == 2 and len(kept) == 3


NUMBERS: list[tuple[str, Callable[[Mapping], Any]]] = [
    ("the rank", lambda m: np.int32(m.tp_rank)),
    ("a multiple", lambda m: np.int64(7 * m.tp_rank - 3)),
    ("falling", lambda m: np.int32(5 - m.tp_rank)),
    ("a table", lambda m: np.int32([4, 4, 9, 1][m.tp_rank])),
    ("far apart", lambda m: np.int32((-1) ** m.tp_rank * 2**31 - (m.tp_rank % 2 == 0))),
    ("a float", lambda m: np.float32(1.5**m.tp_rank)),
    ("a truth", lambda m: np.array(m.tp_rank == 0)),
    ("filled", lambda m: np.full((2, 3), 0.25 * m.tp_rank, np.float32)),
    ("one element", lambda m: np.full((1, 1), 3.0 + m.tp_rank, np.float32)),
    ("a vector", lambda m: np.arange(3, dtype=np.int32) * (m.tp_rank + 1)),
    ("a matrix", lambda m: np.arange(20).reshape(4, 5).astype(np.float32) ** m.tp_rank),
    ("both axes", lambda m: np.float32((m.cp_rank + 2) * (m.tp_rank + 3) ** 2)),
]


@pytest.mark.parametrize("tp, cp", [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("what, number", NUMBERS)
def test_numbers_may_differ_by_rank(
    what: str, number: Callable[[Mapping], Any], tp: int, cp: int
) -> None:
    def build(m: Mapping) -> None:
        y = constant_tensor(number(m))
        y = y if y.type.dtype != "bool" else wrap(F.cast(unwrapped(y), "i32"))
        y = gathered(y, "tp", m.tp_size)
        y = gathered(y, "cp", m.cp_size) if m.cp_size > 1 else y
        y.mark_output("y")

    def rank(c: int, t: int) -> Mapping:
        return Mapping(tp * cp, c * tp + t, tp_size=tp, cp_size=cp)

    wanted = np.array([[number(rank(c, t)) for t in range(tp)] for c in range(cp)])
    got = run(build, {}, tp, cp=cp)["y"]
    assert np.array_equal(got, wanted if cp > 1 else wanted[0]), what


def test_numbers_that_follow_the_rank_need_no_table() -> None:
    with new_session():
        module = trace(lambda m: constant_tensor(3 * m.tp_rank + 1).mark_output("y"), 4)
    assert next(op.opname for op in module.ops()) == "rank"
    assert not module.weights and not any(op.opname == "gather" for op in module.ops())


@pytest.mark.parametrize("step", [1, 2])
def test_slices_may_begin_elsewhere_on_every_rank(step: int) -> None:
    x = fresh().normal(size=(3, 12)).astype(np.float32)

    def build(m: Mapping) -> None:
        start = 4 * m.tp_rank
        y = F.slice(unwrapped(source(size=12)), dim=1, start=start, stop=start + 4, step=step)
        gathered(wrap(y), "tp", m.tp_size).mark_output("y")

    wanted = [x[:, 4 * i : 4 * i + 4 : step] for i in range(3)]
    assert np.array_equal(run(build, {"x": x}, 3)["y"], wanted)


def test_ranks_may_take_other_parts_of_a_split() -> None:
    x = fresh().normal(size=(3, 12)).astype(np.float32)

    def build(m: Mapping) -> None:
        part = T.chunk(source(size=12), m.tp_size, dim=1)[m.tp_rank]
        gathered(part * part, "tp", m.tp_size).mark_output("y")

    wanted = np.square(np.split(x, 4, axis=1))
    assert np.array_equal(run(build, {"x": x}, 4)["y"], wanted)


def test_stages_hand_on_constants_and_weights() -> None:
    numbers = fresh().normal(size=(2, 6)).astype(np.float32)

    def build(m: Mapping) -> None:
        if m.is_first_pp_rank():
            T.send(constant_tensor(np.full((2, 6), 3.0 + m.tp_rank, np.float32)), m.next_pp_rank())
            T.send(Parameter(numbers * m.tp_rank).value, m.next_pp_rank())
            return
        a, b = (T.recv(Tensor(n, "float32", [2, 6]), m.prev_pp_rank()) for n in ("a", "b"))
        gathered(a - b, "tp", m.tp_size).mark_output("y")

    assert np.allclose(run(build, {}, 2, 2)["y"], [3 + 0 * numbers, 4 - numbers])


def test_constants_of_either_kind_are_the_same() -> None:
    def build(m: Mapping) -> None:
        as_vector = one("constant", values=(2, 2), shape=(2,), dtype="i32")
        y = one("full", value=2, shape=(2,), dtype="i32") if m.tp_rank else as_vector
        wrap(one("add", y, y)).mark_output("y")

    assert run(build, {}, 2)["y"].tolist() == [4, 4]


def test_engines_keep_the_values_that_parameters_had() -> None:
    weight, arrays = Parameter(shape=(6,)), fresh().normal(size=(2, 6)).astype(np.float32)
    with new_session() as session:
        for rank, array in enumerate(arrays):
            with net_guard(network := Network()):
                weight.value = array
                y = gathered(source() * weight.value, "tp", 2)
                y.mark_output("y")
            network.mapping = Mapping(2, rank, tp_size=2)
            session.add("engine", rank, network)
        weight.value = np.zeros(6)
        x = np.ones((1, 6), np.float32)
        assert np.array_equal(irc.evaluate(merged("engine"), {"x": x})["y"][:, 0], arrays)


def test_scalar_parameters_may_differ_by_rank() -> None:
    def build(m: Mapping) -> None:
        scale = Parameter(np.array(2.0 + m.tp_rank, np.float32)).value
        gathered(scale * 1.0, "tp", m.tp_size).mark_output("y")

    assert run(build, {}, 3)["y"].tolist() == [2.0, 3.0, 4.0]


def test_weight_references_may_differ_by_rank() -> None:
    def build(m: Mapping) -> None:
        same, other = Parameter(shape=(2,)), Parameter(shape=(2,))
        same.value = ZerosRef((2,), "f32")
        other.value = ZerosRef((2,), "f16" if m.tp_rank else "f32")
        gathered(binary("Add", same, other), "tp", 2).mark_output("y")

    with new_session():
        module = trace(build, 2)
    texts = [str(weight.ref) for weight in module.weights.values()]
    assert texts[0] == "zeros([2], f32)"
    assert texts[1] == "concat(zeros([2], f32), zeros([2], f16).cast(f32); 0).shard(0, tp)"
    assert irc.evaluate(module, {})["y"].tolist() == [[0, 0], [0, 0]]


def test_unset_parameters_stay_unbound() -> None:
    def build(m: Mapping) -> None:
        weight = Parameter(shape=(3, 6))
        weight.sharded = 0, ("tp",)
        default_net().set_named_parameters([("fc.weight", weight)])
        linear(source(), weight).mark_output("y")

    with new_session():
        assert trace(build).weights["fc.weight"].ref == UnboundRef("fc.weight")
        weight = trace(build, 2).weights["fc.weight"]
    assert str(weight.ref) == 'unbound("fc.weight", [6, 6]).shard(0, tp)'


PAST = OrderedDict(b=[[1, 2, 5]], two=[2], heads=[4], length=[[1, 4, 8]], d=[3])


def past_input(name: str, m: Mapping) -> Tensor:
    heads = 4 // m.tp_size
    return Tensor(name, "float32", [-1, 2, heads, -1, 3], PAST | {"heads": [heads]})


def cached(m: Mapping) -> None:
    past = past_input("past_key_value_0", m)
    present = past * (1.0 + m.tp_rank)
    present.reuses = past.name
    present.mark_output("present_key_value_0")


def test_caches_are_shared_by_heads_and_written_in_place() -> None:
    past = fresh().normal(size=(2, 2, 4, 3, 3)).astype(np.float32)
    with new_session():
        module = trace(cached, 2)
        got = irc.evaluate(module, {"past_key_value_0": past})["present_key_value_0"]
    layout = "f32[b, 2, 4@tp, length, 3]"
    (arg,), (result,) = module.main.args, module.main.returned
    assert str(arg.type.of) == str(result.type.of) == layout
    assert module.main.aliases() == {0: 0}
    assert np.array_equal(got, past * np.array([1, 1, 2, 2], np.float32)[:, None, None])


def growing(m: Mapping) -> None:
    """A cache per stage that grows by one token, which the stage hands on."""
    past = past_input(f"past_key_value_{m.pp_rank}", m)
    if m.is_first_pp_rank():
        token = Tensor("token", "float32", [-1, 2, 4, 1, 3], PAST | {"heads": [4], "length": [1]})
    else:
        other = PAST | {"heads": [4], "length": [1]}
        token = default_net().receive(Tensor("h", "float32", [-1, 2, 4, 1, 3], other), m.rank - 2)
    heads = 4 // m.tp_size
    first = heads * m.tp_rank
    own = wrap(F.slice(unwrapped(token), dim=2, start=first, stop=first + heads))
    present = wrap(F.concat([unwrapped(past), unwrapped(own)], dim=3))
    present.mark_output(f"present_key_value_{m.pp_rank}")
    if not m.is_last_pp_rank():
        default_net().send(token * 2.0, m.rank + 2).mark_output("hidden_states_output")


def test_caches_of_stages_grow() -> None:
    random = fresh()
    caches = [random.normal(size=(2, 2, 4, 3, 3)).astype(np.float32) for _ in range(2)]
    token = random.normal(size=(2, 2, 4, 1, 3)).astype(np.float32)
    inputs = {"token": token, "past_key_value_0": caches[0], "past_key_value_1": caches[1]}
    got = run(growing, inputs, 2, 2)
    for i, cache in enumerate(caches):
        wanted = np.concatenate([cache, token * 2**i], axis=3)
        assert np.array_equal(got[f"present_key_value_{i}"], wanted)


def test_other_inputs_and_outputs_may_be_shared_along_a_dimension() -> None:
    def build(m: Mapping) -> None:
        y = source(size=6 // m.tp_size) * 2.0
        default_net().share("%x", 1)
        default_net().share("y", 1)
        y.mark_output("y")

    x = fresh().normal(size=(3, 6)).astype(np.float32)
    assert np.array_equal(run(build, {"x": x}, 3)["y"], x * 2)


# -- networks that do not belong together


def mark(y: Tensor, name: str = "y") -> None:
    y.mark_output(name)


# tp, pp, a part of the message, and what every rank m builds
DIFFERENCES = """
2 1 | an operation differs by rank: mul(%x, full) at case.py:1 on rank 0, add(%x, full) at case.py
mark(source() + 1.0 if m.rank else source() * 1.0)

2 1 | softmax(%x, dim=1) at case.py:1 on rank 1
mark(wrap(F.softmax(unwrapped(source()), dim=m.rank)))

2 1 | an operand of mul differs by rank: nothing on rank 0, exp(%x) at case.py:1 on rank 1
mark([x := source(), T.exp(x)][m.rank] * 2.0)

2 1 | past=%n, head_dim=4
x = unwrapped(Tensor("x", "float32", [2, 3, 4]))
lengths = {"past" if m.rank else "lengths": unwrapped(Tensor("n", "int32", [2]))}
mark(wrap(F.attention(x, x, x, head_dim=4, **lengths)))

2 1 | an operation differs by rank: nothing on rank 0, exp(mul) at case.py:2 on rank 1
x = source() * 2.0
mark(T.exp(x) if m.rank else x)

2 1 | an operand of all_reduce differs by rank: mul(%x
x = source()
both = [x * 2.0, x * 3.0]
mark(T.allreduce(both[m.rank], [0, 1]) + T.allreduce(both[1 - m.rank], [0, 1]))

2 1 | an operation differs by rank: all_reduce(%x, axis=tp, op=sum
mark((T.allgather if m.rank else T.allreduce)(source(), [0, 1]))

2 1 | the input z differs by rank: f32[b, 6] on rank 0, missing on rank 1
mark(source("x" if m.rank else "z") * 1.0)

2 1 | the weight constant differs by rank: f32[2] on rank 0, f32[3] on rank 1
mark(Parameter(np.ones(2 + m.rank, np.float32)).value * 1.0)

2 1 | a weight differs by rank: w0 on rank 0, w1 on rank 1
weight = Parameter(np.ones(2, np.float32))
default_net().set_named_parameters([(f"w{m.rank}", weight)])
mark(weight.value * 1.0)

2 1 | the weight constant differs by rank: no array on rank 0, an array on rank 1
weight = Parameter(shape=(2,))
if m.rank: weight.value = np.ones(2)
mark(binary("Mul", weight, 1.0))

2 1 | the range of the dimension 'b' differs by rank: (1, 2, 3) on rank 0
mark(Tensor("x", "int32", [-1], OrderedDict(b=[[1, 2, 3 + m.rank]])) * 2)

2 1 | the set of outputs differs by rank: ['z'] on rank 0, ['y'] on rank 1
mark(source() * 1.0, "y" if m.rank else "z")

1 1 | the network of rank 0 has no outputs; call mark_output()
source()

1 1 | rank 0 sends 1 tensors to rank 0, which receives 0 from it; expected 0
mark(default_net().send(source() * 1.0, 0))

1 2 | is sent as f32[b, 5] and received as f32[b, 6], at case.py
if m.rank: mark(default_net().receive(source("h"), 0))
else: mark(default_net().send(source("x", 5) * 1.0, 1), "hidden_states_output")

2 2 | tensor 0 from pipeline stage 0 to 1 differs by rank: mul(%x, full) at case.py:2 on rank 0
x = source()
both = [x * 2.0, x + 1.0]
if m.is_first_pp_rank(): T.send(both[m.tp_rank], m.next_pp_rank())
else: mark(T.recv(x, m.prev_pp_rank()))

2 2 | rank 1 sends 1 tensors to rank 3, which receives 0 from it
x = source() * 1.0
if m.is_first_pp_rank() and m.tp_rank: T.send(x, m.next_pp_rank())
mark(x, f"y{m.pp_rank}")

2 2 | rank 0 sends 0 tensors to rank 2, which receives 1 from it
if m.is_first_pp_rank(): T.send(source() * 1.0, 3 - m.tp_rank)
else: mark(T.recv(source(), m.prev_pp_rank()))

1 2 | rank 1 sends 0 tensors to rank 0, which receives 1 from it; exp
x = T.recv(source(), m.prev_pp_rank()) * 1.0
mark(x) if m.is_last_pp_rank() else T.send(x, m.next_pp_rank())

1 1 | and of another one each time; found x
x = source()
T.recv(x, 0), T.recv(x, 0)

1 2 | expected recv() of an input of the network, which gives the
default_net().receive(source() * 1.0, 0)
"""


@pytest.mark.parametrize("case", DIFFERENCES.strip().split("\n\n"))
def test_other_differences_are_refused(case: str) -> None:
    head, _, text = case.partition("\n")
    sizes, message = head.split(" | ")
    code = compile(text, "case.py", "exec")
    with new_session(), pytest.raises(irc.Error) as error:
        trace(lambda m: exec(code, globals() | {"m": m}), *map(int, sizes.split()))
    assert message in error.value.message
    if message.startswith("an operation"):
        assert str(error.value).count("case.py:") == (2 if "nothing" in message else 3)


def test_every_rank_of_one_world_needs_a_network() -> None:
    with net_guard(network := Network()):
        (source() * 1.0).mark_output("y")
    with pytest.raises(irc.Error, match="expected networks of 1 ranks, found those of rank 0, 1;"):
        merge({0: network, 1: network}, Mapping())
    with pytest.raises(irc.Error, match="expected networks of 3 ranks, found those of rank 0; bu"):
        merge({0: network}, Mapping(3, tp_size=3))
