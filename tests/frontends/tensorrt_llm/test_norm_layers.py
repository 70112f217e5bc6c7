"""Norms and convolutions as layers, of both generations, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm import layers
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.frontends.tensorrt_llm.traced import run

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

layer_norm: Any = layers.LayerNorm


class Int(torch.nn.Module):
    """What Cast("int32") is."""

    def forward(self, x: Any) -> Any:
        return x.int()


# a layer, the same in PyTorch if it has another text, and the shape of x
ROWS = """
LayerNorm(6, 1e-3) | | 2 6
LayerNorm((3, 4), bias=False) | | 2 3 4
LayerNorm(6, elementwise_affine=False) | | 2 6
RmsNorm(normalized_shape=6, eps=1e-2) | RMSNorm(6, 1e-2) | 2 3 6
RmsNorm(6, elementwise_affine=False) | RMSNorm(6, 1e-6, elementwise_affine=False) | 2 6
GroupNorm(2, 4) | | 2 4 7 9
Conv1d(4, 6, 3, 2, 1, groups=2) | | 2 4 9
Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), bias=False) | | 2 4 7 9
AvgPool2d(3, 2, 0, False, False) | AvgPool2d(3, 2) | 2 4 7 9
Mish() | | 2 4 7 9
Cast("int32") | Int() | 2 4 7 9
ConvTranspose2d(4, 6, (3, 2), (2, 3), 1, (1, 2), groups=2) \
| ConvTranspose2d(4, 6, (3, 2), (2, 3), 1, groups=2) | 2 4 7 9
"""  # TensorRT-LLM ignores the other arguments of AvgPool2d and ConvTranspose2d


@pytest.mark.parametrize("row", ROWS.strip().split("\n"))
@pytest.mark.parametrize("version", ["0.7", "0.16"])
def test_a_layer(row: str, version: str, rng: np.random.Generator) -> None:
    call, meaning, sizes = (part.strip() for part in row.split("|"))
    shape = tuple(map(int, sizes.split()))
    expected = eval(meaning or call, vars(torch.nn) | {"Int": Int})
    for value in expected.parameters():
        value.data = torch.from_numpy(rng.standard_normal(value.shape).astype(np.float32))
    x = rng.standard_normal(shape).astype(np.float32)

    def build(mapping: Any) -> None:
        layer = eval(call, vars(layers).copy())
        named = dict(expected.named_parameters())
        assert [name for name, _ in layer.named_parameters()] == list(named)
        for key, value in named.items():
            own: Any = getattr(layer, key)
            own.value = value.data.reshape(own.shape)
        layer(Tensor("x", "float32", shape)).mark_output("y")

    y = run(build, {"x": x}, version=version)["y"]
    wanted = expected(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def test_positional_arguments_of_rms_norm_depend_on_the_release() -> None:
    make: Any = layers.RmsNorm
    with new_session("0.7"):
        assert make(6, 1e-2).eps == 1e-2
    with new_session("0.16"):
        layer = make(6, 3, 1e-2)
    assert (layer.num_groups, layer.eps) == (3, 1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.GroupNorm(3, 4), "expected groups that divide the 4 channels, found 3"),
        (lambda: layer_norm(4, tp_size=2, tp_dim=0), "tp_size is not supported"),
        (lambda: layers.Conv2d(4, 6, 3, groups=4), "divide 4 and 6 channels, found 4"),
        (lambda: layers.Conv2d(4, 6, 3, padding_mode="same"), "padding_mode 'zeros', found 'same'"),
    ],
)
def test_arguments_that_no_layer_has(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(Error) as caught:
        make()
    assert message in caught.value.message
