"""Examples of functions of TensorRT-LLM, each with its meaning in PyTorch.

A row has a call in a network, the same in PyTorch, and the inputs x, y and z of both: f floats from
-2 to 2, i i32, l i64 or b bool, with the range of the numbers, if it is another (`i3` is `i0:3`),
and the sizes, of which names are dynamic. A row may begin with a release.
"""

from __future__ import annotations

import math  # noqa: F401 (rows name it)
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Bound

torch: Any = pytest.importorskip("torch")
T = torch.nn.functional
F = Bound("functional")
V = F.shape
TABLE = fresh().standard_normal(30).astype(np.float32)
WEIGHTS = np.array([[1, 2, 1, 4]], np.float32)  # of which 1/8, 3/8, 4/8 and 1 are exact


@dataclass(frozen=True)
class Arg:
    """A random input; integers are from `low` to `high - 1`, floats from `low` to `high`.

    Floats differ from each other, so that there is one order of them.
    """

    dtype: str
    shape: tuple[int | str, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Case:
    """A function: how it is called in a network, and the same in PyTorch."""

    text: str  # of the call
    call: Callable[..., Any]
    meaning: Callable[..., Any]
    args: tuple[Arg, ...]
    version: str

    def __str__(self) -> str:
        return self.text


def gated(x: Any, act: Callable[[Any], Any]) -> Any:
    """The first half times act(the second half)."""
    first, second = x.chunk(2, -1)
    return first * act(second)


def gelu(x: Any) -> Any:
    """By the formula with tanh."""
    return T.gelu(x, approximate="tanh")


def quick_gelu(x: Any) -> Any:
    """With a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def truncated(x: Any, y: Any) -> Any:
    """Integers divided towards zero."""
    return torch.div(x, y, rounding_mode="trunc")


def ints(*sizes: int) -> Any:
    """A vector."""
    return torch.tensor(sizes)


def after(function: Callable[[Any], Any], x: Any) -> Any:
    """x, after a function of it was called."""
    function(x)
    return x


def per_row(x: Any, *places: Any) -> Any:
    """Elements of each row."""
    return x[(torch.arange(len(x))[:, None], *(place.long() for place in places))]


def grouped_rms(x: Any, weight: Any) -> Any:
    """rms_norm of parts of 4 features."""
    parts = x.reshape(*x.shape[:-1], 3, 4)
    return T.rms_norm(parts, (4,), eps=1e-6).reshape(x.shape) * weight


def bias(mask: Any, rows: int) -> Any:
    """-inf where a mask is 0."""
    wide = mask[:, None, None, :].expand(-1, 1, rows, -1)
    return torch.where(wide == 0, -torch.inf, 0.0)


INPUTS = {
    "X": "f B 5 S 6", "Y": "f 5 S 1", "N": "i-40:40 B 5 7", "UP": "i1:6 5 1", "DOWN": "i-6:0 5 1",
    "HIDDEN": "f B S 12", "IMAGE": "f B 4 7 9",
}  # fmt: skip

ROWS = """
F.add(x, y) | x + y | X, Y
F.sub(x, y) | x - y | X, Y
F.mul(x, y) | x * y | X, Y
F.minimum(x, y) | torch.minimum(x, y) | X, Y
F.maximum(x, y) | torch.maximum(x, y) | X, Y
F.lt(x, y) | x < y | X, Y
F.gt(x, y) | x > y | X, Y
F.add(x, 1) + 2.5 | x + 3.5 | X
F.add(x, y) | x + y | N, l9 7
0.7: x + V(x, 0) | x + len(x) | N
x + V(x, 0) | x + len(x) | N
x + (1 << 40) | x.long() + (1 << 40) | N
2 - x | 2 - x | N
-x | -x | X
F.div(x, y) | x / y | X, f1:2 6
F.div(x, y) | truncated(x, y) | N, UP
F.div(x, y) | truncated(x, y) | N, DOWN
x / 7 | truncated(x, torch.tensor(7)) | N
x / -7 | truncated(x, torch.tensor(-7)) | N
x / 8.0 | x / 8 | X
3 - x * -y | 3 + x * y | N, DOWN
x // y | torch.floor_divide(x, y) | N, DOWN
F.op_or((x > y) & (y > -3), x <= 1) | ((x > y) & (y > -3)).logical_or(x <= 1) | N, DOWN
F.floordiv(x, y) | torch.floor_divide(x, y) | N, UP
F.floordiv(x, y) | torch.floor_divide(x, y) | N, DOWN
F.modulo(x, y) | torch.remainder(x, y) | N, DOWN
x % 5 | x % 5 | N
F.pow(x, y) | x**y | f0.1:2 B 5 7, f 7
x**3 + F.pow(x, 2) | x**3 + x**2 | N
F.eq(x, y) | x == y | i3 B 7, i3 7
x == y | x == y | i3 B 7, i3 7
x != 1 | x != 1 | i3 B 7
x >= 0.0 | x >= 0 | X
F.op_and(x, y) | torch.logical_and(x, y) | b B 6, b 6
F.op_or(x, y) | torch.logical_or(x, y) | b B 6, b 6
F.op_xor(x, y) | torch.logical_xor(x, y) | b B 6, b 6
F.not_op(x) | ~x | b B 6
F.round(x) | torch.round(x) | f-9:9 B 9
F.sqrt(x) | x.sqrt() | f0:2 B 9
F.log(x) | x.log() | f0.1:2 B 9
x.abs().log() | x.abs().log() | f1:2 B 9
F.exp(x) | x.exp() | X
F.sin(x) | x.sin() | X
F.cos(x) | x.cos() | X
F.abs(x) | x.abs() | X

F.relu(x) | x.relu() | X
F.tanh(x) | x.tanh() | X
F.sigmoid(x) | x.sigmoid() | X
F.silu(x) | T.silu(x) | X
F.gelu(x) | gelu(x) | X
F.quick_gelu(x) | quick_gelu(x) | X
F.squared_relu(x) | torch.relu(x) ** 2 | X
F.swiglu(x) | gated(x, T.silu) | X
F.geglu(x) | gated(x, gelu) | X
F.softplus(x, 2.0, 1.5) | T.softplus(x, 2.0, 1.5) | X
F.clip(x, -0.5, 1.0) | x.clamp(-0.5, 1.0) | X
F.clip(x, -math.inf, 1) | x.clamp(max=1) | N
F.identity(x) | x | X
F.cast(x, "int32") | x.int() | f-9:9 B 9
x.cast("bool") | x.bool() | i3 B 7
F.cast(x, "float16") | x.half() | X
F.where(x, y, z) | torch.where(x, y, z) | b 1 6, f B 5 6, f 6
F.where(x, y, 0) | torch.where(x, y, 0) | b 6, i9 B 6
F.where(x, -math.inf, 0.0) | torch.where(x, torch.tensor(-math.inf), torch.tensor(0.0)) | b B 6

F.shape(x) | ints(*x.shape) | X
V(x, -2) * 2 + 1 | torch.tensor(2 * x.shape[-2] + 1) | X
V(x, 1, "int32", (2, 4)) | torch.tensor(4) | X
x.view(F.concat([V(x, 0), V(x, 1), 3, 4])) | x.unflatten(-1, (3, 4)) | HIDDEN
F.view(F.view(x, F.concat([V(x, 0) * V(x, 1), 12])) + 1.0, F.shape(x)) | x + 1 | HIDDEN
F.view(x, [0, -1]) | x.flatten(1) | X
x.view(F.concat([-1, V(x, 2) / 3])) | x.reshape(-1, 4) | HIDDEN
F.flatten(x, 1, -2) | x.flatten(1, -2) | X
F.flatten(x) | x.flatten() | X
F.permute(x, [2, 0, -1, 1]) | x.permute(2, 0, -1, 1) | X
F.transpose(x, -1, 1) | x.transpose(-1, 1) | X
F.expand_dims(x, [0, 2]) | x[None, :, None] | X
F.unsqueeze(x, -2) | x.unsqueeze(-2) | X
F.squeeze(x, [1, -1]) | x[:, 0] | f B 1 4
F.squeeze(x) | x[0, :, 0] | f 1 S 1 3
F.expand(x, F.concat([V(y, 0), 5, V(y, 2), 6])) | x.expand_as(y) | f 1 5 1 6, X
F.flip(x, [0, -1]) | x.flip([0, -1]) | X
F.stack([x, y], -1) | torch.stack([x, y], -1) | X, X
F.concat([x, y], -2) | torch.cat([x, y], -2) | X, f B 5 K 6
F.concat([x, 7, V(x, 0)]) | torch.cat([x, ints(7, len(x))]) | l9 B
F.slice(x, [0, 1, 0], [V(x, 0), 2, 3], [1, 2, 1]) | x[:, 1:4:2, :3] | f B 5 6
F.slice(x, y, [2, 3]) | x[y[0] : y[0] + 2, y[1] : y[1] + 3] | f 7 6, i3 2
F.slice(x, F.concat([0, y]), F.concat([V(x, 0), 2])) | x[:, y[0] : y[0] + 2] | f B 7, i5 1
F.slice(F.shape(x), [3], [2], [-2]) | ints(x.shape[3], x.shape[1]) | X
F.slice(x, [0, 4], F.concat([V(x, 0), 3]), [1, -1]) | x[:, 2:5].flip(1) | f B 6
F.split(x, 4, dim=-1) | x.split(4, -1) | HIDDEN
F.split(x, [5, 7], 2) | x.split([5, 7], 2) | HIDDEN
F.chunk(x, 3, -1) | x.chunk(3, -1) | HIDDEN
F.unbind(x, -1) | x.unbind(-1) | f B 4 3
F.concat(F.unbind(F.shape(x))) | ints(*x.shape) | X
F.repeat(x, (2, 1, 3)) | x.repeat(2, 1, 3) | f B 4
F.repeat_interleave(x, 3, -1) | x.repeat_interleave(3, -1) | f B 4
F.pad(x, (1, 2, 0, 3), value=1.5) | T.pad(x, (1, 2, 0, 3), value=1.5) | X
F.pad(x, [-2, 1]) | T.pad(x, [-2, 1]) | X
F.arange(2, V(x, 1), "float32") | torch.arange(2.0, x.shape[1]) | f B 7
F.arange(0, V(x, 0), "int32") | torch.arange(len(x)) | f B
x + F.constant(TABLE) | x + torch.from_numpy(TABLE) | f B 30
F.constant(TABLE[:4].reshape(2, 2)) | torch.from_numpy(TABLE[:4].reshape(2, 2)) | X
after(lambda x: F.assertion(x > 0.0, "positive"), x) | x | X

F.gather(x, 1, y) | x.gather(1, y.long()) | f B 5 4, i5 B 7 4
F.gather(x, 1, y) | x.gather(1, y.long()) | f 4 5 6, i5 3 1 2
F.gather(x, -1, y) | x.gather(-1, y) | f 3 5, l5 3 2
F.gather(F.shape(x), 0, 1) | ints(5) | X
F.select(x, 1, 3) | x[:, 3] | X
F.select(V(x).view([2, 2]), 1, 1) | ints(5, 6) | X
x.select(-1, y) | x[..., y[0]] | X, i6 1
F.index_select(x, 1, y) | x[:, y] | X, i5 K
F.scatter(x, 0, y, z) | x.scatter(0, y.long(), z) | f 5 S, i5 1 S, f 1 S
F.gather_nd(x, y) | per_row(x, y[..., 0], y[..., 1]) | f B 5 6 2, i5 B 3 2
F.gather_nd(x, y, 0) | x[y[:, 0], y[:, 1]] | f 4 5 6, i4 3 2
F.gather_nd(x, y, 2) | x.gather(2, y[..., 0].long()) | f B 3 5, i5 B 3 2 1
F.scatter_nd(x, y, z) | x.index_put((y[..., 0].long(), y[..., 1].long()), z) | \
f 4 5 6, i4 1 2, f 1 6
F.masked_scatter(x, y, z) | x.masked_scatter(y, z) | X, b B 5 S 6, X
F.masked_scatter(x, y, z) | x.masked_scatter(y, z) | f 4 6, b 6, f 24
F.gather_last_token_logits(x, y + 1, False) | per_row(x, y[:, None])[:, 0] | f B 7 4, i7 B
F.gather_last_token_logits(x, y * 0, False) | x[:, -1] | f B 7 4, i7 B
F.gather_last_token_logits(x, y, False) | per_row(x, y) | f B 7 4, i7 B 3
F.gather_last_token_logits(x, y, True) | x[y - 1] | f 20 4, i1:21 B
F.gather_last_token_logits(x, None, True) | x | X
F.expand_mask(x) | bias(x, x.shape[1]) | i2 B S
F.expand_mask(x, 3) | bias(x, 3) | b B S

F.max(x, dim=-1, keepdim=True) | x.amax(-1, True) | X
F.min(x, dim=1) | x.amin(1) | X
F.max(F.shape(x), 0) + 0 | torch.tensor(5) | f 3 5
F.sum(x, (1, -1)) | x.sum((1, -1)) | X
F.sum(x, 0, True) | x.sum(0, True) | i9 B 5
x.mean(dim=2, keepdim=True) | x.mean(2, True) | X
F.mean(x, 0) | x.mean(0) | X
F.prod(x, 1) | x.prod(1) | X
x.view([F.prod(F.shape(x), 0)]) | x.flatten() | X
F.reduce(x, "AVG", 1) | x.mean(1) | X
F.argmax(x, 1) | x.argmax(1) | X
F.argmax(x, -1, True) | x.argmax(-1, True) | X
F.topk(x, 3, dim=-1) | x.topk(3, -1) | X
F.topk(x, F.constant(np.int32(2)), 1, largest=False) | x.topk(2, 1, largest=False) | X
F.topk(x, 2, 0, largest=False)[0] | x.topk(2, 0, largest=False)[0] | i-2147483648:-2147483645 9 S
F.cumsum(x, -1) | x.cumsum(-1) | X
F.cumsum(x, 0, prefer_plugin=False) | x.cumsum(0) | i9 B 4
F.softmax(x) | x.softmax(-1) | X
F.softmax(x, 1) | x.softmax(1) | X
F.log_softmax(x, 1) | x.log_softmax(1) | X
F.categorical_sample(F.expand(F.constant(WEIGHTS), [V(x, 0), 4]), x) | \
torch.bucketize(x, torch.tensor([0.125, 0.375, 0.5])) | f0:1 B
F.matmul(x, y) | x @ y | f B 3 S 4, f 4 5
F.matmul(x, y) | x @ y | f 4, f B 4 3
F.matmul(x, y, transa=True, transb=True) | x.mT @ y.mT | f B 4 S, f 3 4
F.einsum("bsd,bth->bdht", [x, y]) | torch.einsum("bsd,bth->bdht", x, y) | f B S 4, f B 3 2
F.einsum("ij,jk", [x, y]) | x @ y | f B 4, f 4 3
F.outer(x, y) | torch.outer(x, y) | f B, f 5
F.layer_norm(x, 12, y, z, 1e-3) | T.layer_norm(x, (12,), y, z, 1e-3) | HIDDEN, f 12, f 12
F.layer_norm(x, (5, 6), 1.0, 0.0) | T.layer_norm(x, (5, 6)) | f B 5 6
F.rms_norm(x, 12, 1, y, 1e-3) | T.rms_norm(x, (12,), y, 1e-3) | HIDDEN, f 12
0.7: F.rms_norm(x, (12,), y, 1e-3) | T.rms_norm(x, (12,), y, 1e-3) | HIDDEN, f 12
F.rms_norm(x, 12, 3, y) | grouped_rms(x, y) | HIDDEN, f 12
F.rms_norm(x, 12, weight=2.0) | T.rms_norm(x, (12,), eps=1e-6) * 2 | HIDDEN
F.rms_norm(x, 12) | T.rms_norm(x, (12,), eps=1e-6) | HIDDEN
F.group_norm(x, 3, y, z) | T.group_norm(x, 3, y, z) | f B 6 S 2, f 6, f 6

F.conv1d(x, y, z, 2, 1) | T.conv1d(x, y[..., 0], z, 2, 1) | f B 4 9, f 6 4 3 1, f 6
F.conv1d(x, y, padding=2) | T.conv1d(x, y, padding=2) | f B 4 S, f 6 4 3
F.conv2d(x, y, None, (2, 1), (1, 0), (1, 2), 2) | \
T.conv2d(x, y, None, (2, 1), (1, 0), (1, 2), 2) | IMAGE, f 6 2 3 2
F.conv2d(x, y, z, pre_padding=(1, 2), post_padding=(0, 1)) | \
T.conv2d(T.pad(x, (2, 1, 1, 0)), y, z) | f 4 7 9, f 6 4 3 2, f 6
F.conv_transpose2d(x, y, z, (2, 3), (1, 0), (1, 2), (2, 1), 2) | \
T.conv_transpose2d(x, y, z, (2, 3), (1, 0), groups=2) | IMAGE, f 4 3 3 2, f 6
F.conv_transpose2d(x, y, None, 1, 3) | T.conv_transpose2d(x, y, None, 1, 3) | IMAGE, f 4 3 2 3
F.conv_transpose2d(x, y) | T.conv_transpose2d(x, y) | f 4 3 5, f 4 3 2 3
F.avg_pool2d(x, (2, 3)) | T.avg_pool2d(x, (2, 3)) | IMAGE
F.avg_pool2d(x, (3, 2), (2, 3)) | T.avg_pool2d(x, (3, 2), (2, 3)) | f 4 6 8
F.avg_pool2d(x, 3, 2, 1, True, False) | T.avg_pool2d(x, 3, 2) | IMAGE
F.interpolate(x, [5, 20]) | T.interpolate(x, [5, 20]) | IMAGE
F.interpolate(x, [5, 20], mode="nearest-exact", antialias=True) | \
T.interpolate(x, [5, 20]) | IMAGE
F.interpolate(x, [13, 4], None, "bilinear", True) | \
T.interpolate(x, [13, 4], mode="bilinear") | IMAGE
F.interpolate(x, [13, 4], None, "bicubic", True) | \
T.interpolate(x, [13, 4], mode="bicubic") | IMAGE
F.interpolate(x, 12, mode="linear") | T.interpolate(x, 12, mode="linear") | f B 2 5
F.interpolate(x, 12, None, "linear", True) | \
T.interpolate(x, 12, mode="linear", align_corners=True) | f B 2 5
F.interpolate(x, scale_factor=1.7, mode="bilinear") | \
T.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True) | IMAGE
"""


def _arg(text: str) -> Arg:
    kind, *sizes = INPUTS.get(text, text).split()
    low, _, high = kind[1:].rpartition(":")
    dtype = {"f": "float32", "i": "int32", "l": "int64", "b": "bool"}[kind[0]]
    shape = tuple(int(size) if size.isdigit() else size for size in sizes)
    span = (-2.0, 2.0) if not high else (float(low or 0), float(high))
    return Arg(dtype, shape, *span)


def _case(row: str) -> Case:
    call, meaning, inputs = row.split(" | ")
    version, colon, rest = call.partition(": ")
    call, version = (rest, version) if colon and version[0] == "0" else (call, "0.16")
    call_of, meaning_of = (eval(f"lambda x=0, y=0, z=0: {text}") for text in (call, meaning))
    return Case(call, call_of, meaning_of, tuple(map(_arg, inputs.split(", "))), version)


CASES = [_case(row) for row in ROWS.split("\n") if row]
