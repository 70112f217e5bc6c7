"""Networks of ranks that do not belong together: the error names both ranks and their lines."""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest

import irc
from irc.frontends import functional as F
from irc.frontends.tensorrt_llm import Network, Parameter, Tensor, default_net, merge, net_guard
from irc.frontends.tensorrt_llm.arithmetic import binary, unwrapped
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional import recv, send
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.tensor import wrap

from .traced import source, trace

Build = Callable[[Mapping], None]


def other_operand(m: Mapping) -> Tensor:
    x = source()
    y = wrap(F.exp(unwrapped(x)))
    return (y if m.rank else x) * 2.0


def other_count(m: Mapping) -> Tensor:
    x = source() * 2.0
    return wrap(F.exp(unwrapped(x))) if m.rank else x


def other_name(m: Mapping) -> Tensor:
    weight = Parameter(np.ones(2, np.float32))
    default_net().set_named_parameters([(f"w{m.rank}", weight)])
    return weight.value * 1.0


def other_optional_operand(m: Mapping) -> Tensor:
    x = unwrapped(Tensor("x", "float32", [2, 3, 4]))
    lengths = {"past" if m.rank else "lengths": unwrapped(Tensor("n", "int32", [2]))}
    return wrap(F.attention(x, x, x, head_dim=4, **lengths))


def array_on_one_rank(m: Mapping) -> Tensor:
    weight = Parameter(shape=(2,))
    if m.rank:
        weight.value = np.ones(2)
    return binary("mul", weight, 1.0)


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda m: source() + 1.0 if m.rank else source() * 1.0,
            "rank 1 has add(%x, full), and rank 0 has mul(%x, full) at ",
        ),
        (
            lambda m: wrap(F.softmax(unwrapped(source()), dim=m.rank)),
            "rank 1 has softmax(%x, dim=1), and rank 0 has softmax(%x, dim=0)",
        ),
        (other_operand, "rank 1 has mul(exp, full), and rank 0 has mul(%x, full)"),
        (other_optional_operand, "past=%n, head_dim=4"),
        (other_count, "rank 1 has exp(mul), and rank 0 has nothing"),
        (
            lambda m: source(size=6 + m.rank) * 1.0,
            "the input x is f32[b, 6] on rank 0 and f32[b, 7] on rank 1",
        ),
        (
            lambda m: source("x" if m.rank else "z") * 1.0,
            "the input z is f32[b, 6] on rank 0 and missing on rank 1",
        ),
        (
            lambda m: Parameter(np.ones(2 + m.rank, np.float32)).value * 1.0,
            "the weight constant is f32[3] on rank 1 and f32[2] on rank 0",
        ),
        (other_name, "the networks use the weight w0 in one place, where rank 1 uses w1"),
        (array_on_one_rank, "the weight constant has an array on some ranks only"),
        (
            lambda m: Tensor("x", "int32", [-1], OrderedDict(b=[[1, 2, 3 + m.rank]])) * 2,
            "the dimension 'b' is (1, 2, 4) on rank 1",
        ),
    ],
)
def test_other_differences_are_refused(build: Callable[..., Tensor], message: str) -> None:
    with new_session(), pytest.raises(irc.Error) as error:
        trace(lambda m: build(m).mark_output("y"), 2)
    assert message in str(error.value)


def test_differences_show_the_lines_of_both_ranks() -> None:
    def build(m: Mapping) -> None:
        x = source()
        y = wrap(F.exp(unwrapped(x))) if m.rank else wrap(F.log(unwrapped(x)))
        y.mark_output("y")

    with new_session(), pytest.raises(irc.Error) as error:
        trace(build, 2)
    assert str(error.value).count("test_merge_refusals.py") == 2


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


def sends_other_values(m: Mapping) -> None:
    if not m.is_first_pp_rank():
        recv(source("h"), m.prev_pp_rank()).mark_output("y")
        return
    x = source()
    both = [x * 2.0, x + 1.0]
    send(both[m.tp_rank], m.next_pp_rank())


def sends_on_one_rank(m: Mapping) -> None:
    x = source() * 1.0
    if m.is_first_pp_rank() and m.tp_rank:
        send(x, m.next_pp_rank())
    x.mark_output(f"y{m.pp_rank}")


def sends_across(m: Mapping) -> None:
    x = source()
    if m.is_first_pp_rank():
        send(x * 1.0, 3 - m.tp_rank)
    else:
        recv(x, m.prev_pp_rank()).mark_output("y")


def receives_first(m: Mapping) -> None:
    x = recv(source(), m.prev_pp_rank())
    x = x * 1.0
    x.mark_output("y") if m.is_last_pp_rank() else send(x, m.next_pp_rank())


def receives_twice(m: Mapping) -> None:
    x = source()
    for _ in range(2):
        recv(x, 0)


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
        (
            sends_too_far,
            (1, 3),
            "rank 0 sends to rank 2, and rank 1 receives from rank 0; expected 1",
        ),
        (sends_more, (1, 2), "stage 0 sends 1 tensors, and stage 1 receives 0; expected one recv"),
        (sends_another_shape, (1, 2), "stage 0 sends f32[b, 5], but h, which stage 1 receives at"),
        (sends_other_values, (2, 2), "what pipeline stage 0 sends is another value on some rank"),
        (sends_on_one_rank, (2, 2), "rank 0 sends 0 tensors, and rank 1 1; expected as many on"),
        (sends_across, (2, 2), "rank 0 sends to rank 3, and rank 2 receives from rank 0"),
        (receives_first, (1, 2), "the first pipeline stage has a recv(), but no stage is before"),
        (receives_twice, (1, 1), "the input x is received twice; give every recv() its own input"),
        (receives_a_result, (1, 2), "expected recv() of an input of the network"),
    ],
)
def test_stages_and_outputs_must_fit(build: Build, sizes: tuple[int, int], message: str) -> None:
    with new_session(), pytest.raises(irc.Error) as error:
        trace(build, *sizes)
    assert message in str(error.value)


def test_every_rank_of_one_world_needs_a_network() -> None:
    network = Network()
    with net_guard(network):
        (source() * 1.0).mark_output("y")
    with pytest.raises(irc.Error, match="the engine has a network of rank 1, but the Mapping"):
        merge({0: network, 1: network}, Mapping())
    with pytest.raises(
        irc.Error, match="expected a network for every rank of tp=3, found none for"
    ):
        merge({0: network}, Mapping(3, tp_size=3))
