"""The networks of all ranks, joined: numbers and arrays by rank, stages, and what is refused."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import functional as F
from irc.frontends.tensorrt_llm import Network, Parameter, Tensor, default_net, merge, net_guard
from irc.frontends.tensorrt_llm.arithmetic import binary
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import constant_tensor
from irc.frontends.tensorrt_llm.tensor import unwrap, wrap
from irc.weights import UnboundRef, ZerosRef
from tests.fresh import fresh

from .traced import run, trace

Build = Callable[[Mapping], None]


def source(name: str = "x", size: int = 6, dtype: str = "float32") -> Tensor:
    return Tensor(name, dtype, [-1, size], OrderedDict([("b", [[1, 2, 5]]), (f"{name}s", [size])]))


def linear(x: Tensor, weight: Parameter) -> Tensor:
    return wrap(F.linear(unwrap(x), unwrap(weight.value)))


def reduced(x: Tensor, m: Mapping) -> Tensor:
    if m.tp_size == 1:
        return x
    return wrap(F.all_reduce(unwrap(x), axis="tp", group_size=m.tp_size))


def gathered(x: Tensor, axis: str, size: int) -> Tensor:
    """The values of all ranks, one after the other in a new first dimension."""
    tall = wrap(F.unsqueeze(unwrap(x), dims=(0,)))
    return wrap(F.all_gather(unwrap(tall), axis=axis, dim=0, group_size=size))


def columns(array: np.ndarray, m: Mapping) -> np.ndarray:
    return np.array_split(array, m.tp_size, axis=1)[m.tp_rank]


def rows(array: np.ndarray, m: Mapping) -> np.ndarray:
    return np.array_split(array, m.tp_size)[m.tp_rank]


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
            x = source("hidden_states_input", 5)
            x = default_net().receive(x, m.prev_pp_rank())
        for i in m.pp_layers(len(self.up)):
            y = linear(x, Parameter(rows(self.up[i], m)))
            y = linear(wrap(F.relu(unwrap(y))), Parameter(columns(self.down[i], m)))
            x = x + reduced(y, m) + Parameter(self.bias[i]).value
        if m.is_last_pp_rank():
            x.mark_output("y", "float32")
            return
        x = default_net().send(x, m.next_pp_rank())
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
        assert module.local and module.explicit and str(module.mesh) == "pp=2, tp=2"
        assert list(module.functions) == ["stage0", "stage1", "forward"]
        assert module.dims == {"b": (1, 2, 5)}
        artifact = irc.compile(module, tmp_path / "out", bundle=True)
    assert np.allclose(artifact.run({"x": x})["y"], model.oracle(x), atol=1e-3)


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
        y = y if y.type.dtype != "bool" else wrap(F.cast(unwrap(y), "i32"))
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
        y = F.slice(unwrap(source(size=12)), dim=1, start=start, stop=start + 4, step=step)
        gathered(wrap(y), "tp", m.tp_size).mark_output("y")

    wanted = [x[:, 4 * i : 4 * i + 4 : step] for i in range(3)]
    assert np.array_equal(run(build, {"x": x}, 3)["y"], wanted)


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
        gathered(binary("add", same, other), "tp", 2).mark_output("y")

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
    assert {n: str(t) for n, t in module.main.layouts.items()} == {"%past_key_value_0": layout}
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
    own = wrap(F.slice(unwrap(token), dim=2, start=first, stop=first + heads))
    present = wrap(F.concat([unwrap(past), unwrap(own)], dim=3))
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


def other_operation(m: Mapping) -> Tensor:
    x = source()
    return x + 1.0 if m.rank else x * 1.0


def other_attribute(m: Mapping) -> Tensor:
    return wrap(F.softmax(unwrap(source()), dim=m.rank))


def other_operand(m: Mapping) -> Tensor:
    x = source()
    y = wrap(F.exp(unwrap(x)))
    return (y if m.rank else x) * 2.0


def other_count(m: Mapping) -> Tensor:
    x = source() * 2.0
    return wrap(F.exp(unwrap(x))) if m.rank else x


def other_input(m: Mapping) -> Tensor:
    return source(size=6 + m.rank) * 1.0


def missing_input(m: Mapping) -> Tensor:
    x = source("x" if m.rank else "z")
    return x * 1.0


def other_shape(m: Mapping) -> Tensor:
    return Parameter(np.ones(2 + m.rank, np.float32)).value * 1.0


def other_name(m: Mapping) -> Tensor:
    weight = Parameter(np.ones(2, np.float32))
    default_net().set_named_parameters([(f"w{m.rank}", weight)])
    return weight.value * 1.0


def array_on_one_rank(m: Mapping) -> Tensor:
    weight = Parameter(shape=(2,))
    if m.rank:
        weight.value = np.ones(2)
    return binary("mul", weight, 1.0)


def other_range(m: Mapping) -> Tensor:
    return Tensor("x", "int32", [-1], OrderedDict(b=[[1, 2, 3 + m.rank]])) * 2


@pytest.mark.parametrize(
    "build, message",
    [
        (other_operation, "rank 1 has add, and rank 0 has mul at "),
        (other_attribute, "rank 1 has softmax with dim=1, and rank 0 has softmax with dim=0"),
        (other_operand, "rank 1 has mul of exp as operand 0, and rank 0 has mul of %x"),
        (other_count, "rank 1 has exp, and rank 0 has nothing"),
        (other_input, "the input x is f32[b, 6] on rank 0 and f32[b, 7] on rank 1"),
        (missing_input, "the input z is f32[b, 6] on rank 0 and missing on rank 1"),
        (other_shape, "the weight constant is f32[3] on rank 1 and f32[2] on rank 0"),
        (other_name, "the networks use the weight w0 in one place, where rank 1 uses w1"),
        (array_on_one_rank, "the weight constant has an array on some ranks only"),
        (other_range, "the dimension 'b' is (1, 2, 4) on rank 1"),
    ],
)
def test_other_differences_are_refused(build: Callable[..., Tensor], message: str) -> None:
    with new_session(), pytest.raises(irc.Error) as error:
        trace(lambda m: build(m).mark_output("y"), 2)
    assert message in str(error.value)


def test_differences_show_the_lines_of_both_ranks() -> None:
    def build(m: Mapping) -> None:
        x = source()
        y = wrap(F.exp(unwrap(x))) if m.rank else wrap(F.log(unwrap(x)))
        y.mark_output("y")

    with new_session(), pytest.raises(irc.Error) as error:
        trace(build, 2)
    assert str(error.value).count("test_merge.py") == 2


def marks(m: Mapping) -> None:
    (source() * 1.0).mark_output("y" if m.rank else "z")


def sends_alone(m: Mapping) -> None:
    default_net().send(source() * 1.0, 0).mark_output("y")


def sends_too_far(m: Mapping) -> None:
    x = source()
    if m.rank == 0:
        default_net().send(x * 2.0, 2)
    elif m.rank == 1:
        default_net().receive(x, 0)
    (x * 1.0).mark_output(f"y{m.rank}")


def sends_more(m: Mapping) -> None:
    x = source()
    if m.rank == 0:
        default_net().send(x * 2.0, 1)
    (x * 1.0).mark_output(f"y{m.rank}")


def sends_another_shape(m: Mapping) -> None:
    if m.rank == 0:
        default_net().send(source("x", 5) * 1.0, 1).mark_output("hidden_states_output")
    else:
        default_net().receive(source("h"), 0).mark_output("y")


def receives_a_result(m: Mapping) -> None:
    default_net().receive(source() * 1.0, 0)


def nothing(m: Mapping) -> None:
    source()


@pytest.mark.parametrize(
    "build, sizes, message",
    [
        (marks, (2, 1), "only one of ranks 0 and 1 marks the output "),
        (nothing, (1, 1), "the network of rank 0 has no outputs; call mark_output()"),
        (sends_alone, (1, 1), "a send or recv without pipeline stages"),
        (sends_too_far, (1, 3), "rank 0 sends to rank 2; expected 1, the same place in the next"),
        (sends_more, (1, 2), "stage 0 sends 1 tensors, and stage 1 receives 0; expected one recv"),
        (sends_another_shape, (1, 2), "stage 0 sends f32[b, 5], but h, which stage 1 receives at"),
        (receives_a_result, (1, 2), "expected recv() of an input of the network"),
    ],
)
def test_stages_and_outputs_must_fit(build: Build, sizes: tuple[int, int], message: str) -> None:
    with new_session(), pytest.raises(irc.Error) as error:
        trace(build, *sizes)
    assert message in str(error.value)


def test_every_rank_needs_a_network() -> None:
    network = Network()
    with net_guard(network):
        (source() * 1.0).mark_output("y")
    with pytest.raises(
        irc.Error, match="expected a network for every rank of tp=3, found none for"
    ):
        merge({0: network}, Mapping(3, tp_size=3))
