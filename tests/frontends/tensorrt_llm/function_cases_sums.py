"""Examples of functions of indices, of reductions, norms and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.frontends.tensorrt_llm.function_cases import Arg, Case, F, T, X, b, f, i, same, torch

MASK = Arg("int32", ("B", "S"), 0, 2)


def _gathered(x: Any, at: Any) -> Any:
    return torch.gather(x, 1, at.long())


def _scattered(x: Any, at: Any, new: Any) -> Any:
    return x.scatter(0, at.long(), new)


def _scattered_nd(x: Any, at: Any, new: Any) -> Any:
    return x.index_put((at[..., 0].long(), at[..., 1].long()), new)


def _rows(x: Any, at: Any) -> Any:
    return x[torch.arange(len(x))[:, None], at[..., 0], at[..., 1]]


def _positions(x: Any, at: Any) -> Any:
    return x[torch.arange(len(x))[:, None], at.reshape(len(x), -1).long()]


def _sample(at: Any) -> Any:
    """Samples with probabilities 1/8, 2/8, 1/8 and 4/8, which are added without rounding."""
    weights = F.expand(F.constant(np.array([[1, 2, 1, 4]], np.float32)), [F.shape(at, 0), 4])
    return F.categorical_sample(weights, at)


def _sampled(at: Any) -> Any:
    return sum((at > bound).int() for bound in (0.125, 0.375, 0.5))


def _grouped_rms(x: Any, weight: Any) -> Any:
    parts = x.reshape(*x.shape[:-1], 3, 4)
    return T.rms_norm(parts, (4,), eps=1e-6).reshape(x.shape) * weight


def _bias(mask: Any, rows: int = 0) -> Any:
    wide = mask[:, None, None, :].expand(-1, 1, rows or mask.shape[1], -1)
    return torch.where(wide == 0, -torch.inf, 0.0)


INDEXING = [
    Case("gather", lambda x, at: F.gather(x, 1, at), _gathered, (f("B", 5, 4), i(5, "B", 7, 4))),
    Case("gather", lambda x, at: F.gather(x, 1, at), _gathered, (f(4, 5, 6), i(5, 3, 1, 2))),
    Case(
        "gather",
        lambda x, at: F.gather(x, -1, at),
        lambda x, at: x.gather(-1, at),
        (f(3, 5), i(5, 3, 2, dtype="int64")),
    ),
    Case("gather", lambda x: F.gather(F.shape(x), 0, 1), lambda x: torch.tensor([5]), (X,)),
    Case("select", lambda x: F.select(x, 1, 3), lambda x: x[:, 3], (X,)),
    Case("select", lambda x, at: x.select(-1, at), lambda x, at: x[..., at[0]], (X, i(6, 1))),
    Case(
        "index_select",
        lambda x, at: F.index_select(x, 1, at),
        lambda x, at: x[:, at],
        (X, i(5, "K")),
    ),
    Case(
        "scatter",
        lambda x, at, y: F.scatter(x, 0, at, y),
        _scattered,
        (f(5, "S"), i(5, 1, "S"), f(1, "S")),
    ),
    Case("gather_nd", F.gather_nd, _rows, (f("B", 5, 6, 2), i(5, "B", 3, 2))),
    Case(
        "gather_nd",
        lambda x, at: F.gather_nd(x, at, 0),
        lambda x, at: x[at[:, 0], at[:, 1]],
        (f(4, 5, 6), i(4, 3, 2)),
    ),
    Case(
        "gather_nd",
        lambda x, at: F.gather_nd(x, at, 2),
        lambda x, at: x.gather(2, at[..., 0].long()),
        (f("B", 3, 5), i(5, "B", 3, 2, 1)),
    ),
    Case("scatter_nd", F.scatter_nd, _scattered_nd, (f(4, 5, 6), i(4, 1, 2), f(1, 6))),
    same("masked_scatter", torch.masked_scatter, (X, b("B", 5, "S", 6), X)),
    same("masked_scatter", torch.masked_scatter, (f(4, 6), b(6), f(24))),
    Case(
        "gather_last_token_logits",
        lambda x, n: F.gather_last_token_logits(x, n + 1, False),
        lambda x, n: _positions(x, n)[:, 0],
        (f("B", 7, 4), i(7, "B")),
    ),
    Case(
        "gather_last_token_logits",
        lambda x, at: F.gather_last_token_logits(x, at, False),
        _positions,
        (f("B", 7, 4), i(7, "B", 3)),
    ),
    Case(
        "gather_last_token_logits",
        lambda x, n: F.gather_last_token_logits(x, n, True),
        lambda x, n: x[n - 1],
        (f(20, 4), i(21, "B", low=1)),
    ),
    Case(
        "gather_last_token_logits",
        lambda x: F.gather_last_token_logits(x, None, True),
        lambda x: x,
        (X,),
    ),
    same("expand_mask", _bias, MASK),
    same("expand_mask", _bias, b("B", "S"), 3),
]

REDUCTIONS = [
    same("max", torch.amax, X, dim=-1, keepdim=True),
    same("min", torch.amin, X, dim=1),
    Case("max", lambda x: F.max(F.shape(x), 0) + 0, lambda x: torch.tensor(5), (f(3, 5),)),
    same("sum", torch.sum, X, (1, -1)),
    Case("sum", lambda x: F.sum(x, 0, True), lambda x: x.sum(0, True).int(), (i(9, "B", 5),)),
    Case("mean", lambda x: x.mean(dim=2, keepdim=True), lambda x: x.mean(2, True), (X,)),
    same("prod", torch.prod, X, 1),
    Case("prod", lambda x: x.view([F.prod(F.shape(x), 0)]), lambda x: x.flatten(), (X,)),
    Case("reduce", lambda x: F.reduce(x, "AVG", 1), lambda x: x.mean(1), (X,)),
    same("argmax", lambda x, *rest: torch.argmax(x, *rest).int(), X, 1),
    same("argmax", lambda x, *rest: torch.argmax(x, *rest).int(), X, -1, True),
    same("topk", torch.topk, X, 3, dim=-1),
    Case(
        "topk",
        lambda x: F.topk(x, F.constant(np.int32(2)), 1, largest=False),
        lambda x: x.topk(2, 1, largest=False),
        (X,),
    ),
    Case(
        "topk",
        lambda x: F.topk(x, 2, 0, largest=False)[0],
        lambda x: x.topk(2, 0, largest=False)[0],
        (i(3 - 2**31, 9, "S", low=-(2**31)),),
    ),
    same("cumsum", torch.cumsum, X, -1),
    Case(
        "cumsum",
        lambda x: F.cumsum(x, 0, prefer_plugin=False),
        lambda x: x.cumsum(0).int(),
        (i(9, "B", 4),),
    ),
    Case("softmax", F.softmax, lambda x: x.softmax(-1), (X,)),
    same("softmax", torch.softmax, X, 1),
    same("log_softmax", torch.log_softmax, X, 1),
    Case("categorical_sample", _sample, _sampled, (f("B", low=0, high=1),)),
]

PRODUCTS = [
    same("matmul", torch.matmul, (f("B", 3, "S", 4), f(4, 5))),
    same("matmul", torch.matmul, (f(4), f("B", 4, 3))),
    Case(
        "matmul",
        lambda x, y: F.matmul(x, y, transa=True, transb=True),
        lambda x, y: x.mT @ y.mT,
        (f("B", 4, "S"), f(3, 4)),
    ),
    Case(
        "einsum",
        lambda x, y: F.einsum("bsd,bth->bdht", [x, y]),
        lambda x, y: torch.einsum("bsd,bth->bdht", x, y),
        (f("B", "S", 4), f("B", 3, 2)),
    ),
    Case(
        "einsum", lambda x, y: F.einsum("ij,jk", [x, y]), lambda x, y: x @ y, (f("B", 4), f(4, 3))
    ),
    same("outer", torch.outer, (f("B"), f(5))),
]

AFFINE = (f("B", "S", 12), f(12), f(12))
RMS = Case(
    "rms_norm",
    lambda x, w: F.rms_norm(x, 12, 1, w, 1e-3),
    lambda x, w: T.rms_norm(x, (12,), w, 1e-3),
    AFFINE[:2],
)

NORMS = [
    Case(
        "layer_norm",
        lambda x, w, v: F.layer_norm(x, 12, w, v, 1e-3),
        lambda x, w, v: T.layer_norm(x, (12,), w, v, 1e-3),
        AFFINE,
    ),
    Case(
        "layer_norm",
        lambda x: F.layer_norm(x, (5, 6), 1.0, 0.0),
        lambda x: T.layer_norm(x, (5, 6)),
        (f("B", 5, 6),),
    ),
    RMS,
    Case("rms_norm", lambda x, w: F.rms_norm(x, (12,), w, 1e-3), RMS.meaning, RMS.args, "0.7"),
    Case("rms_norm", lambda x, w: F.rms_norm(x, 12, 3, w), _grouped_rms, AFFINE[:2]),
    Case(
        "rms_norm",
        lambda x: F.rms_norm(x, 12, weight=2.0),
        lambda x: T.rms_norm(x, (12,), eps=1e-6) * 2,
        AFFINE[:1],
    ),
    Case(
        "rms_norm",
        lambda x: F.rms_norm(x, 12),
        lambda x: T.rms_norm(x, (12,), eps=1e-6),
        AFFINE[:1],
    ),
    Case(
        "group_norm",
        lambda x, w, v: F.group_norm(x, 3, w, v),
        lambda x, w, v: T.group_norm(x, 3, w, v),
        (f("B", 6, "S", 2), f(6), f(6)),
    ),
]

IMAGE = f("B", 4, 7, 9)


def _asymmetric(x: Any, weight: Any, bias: Any) -> Any:
    return T.conv2d(T.pad(x, (2, 1, 1, 0)), weight, bias)


def _deconvolved(x: Any, weight: Any, bias: Any) -> Any:
    return T.conv_transpose2d(x, weight, bias, (2, 3), (1, 0), groups=2)


CONVOLUTIONS = [
    Case(
        "conv1d",
        lambda x, w, v: F.conv1d(x, w, v, 2, 1),
        lambda x, w, v: T.conv1d(x, w[..., 0], v, 2, 1),
        (f("B", 4, 9), f(6, 4, 3, 1), f(6)),
    ),
    same("conv1d", T.conv1d, (f("B", 4, "S"), f(6, 4, 3)), padding=2),
    same("conv2d", T.conv2d, (IMAGE, f(6, 2, 3, 2)), None, (2, 1), (1, 0), (1, 2), 2),
    Case(
        "conv2d",
        lambda x, w, v: F.conv2d(x, w, v, pre_padding=(1, 2), post_padding=(0, 1)),
        _asymmetric,
        (f(4, 7, 9), f(6, 4, 3, 2), f(6)),
    ),
    Case(
        "conv_transpose2d",
        lambda x, w, v: F.conv_transpose2d(x, w, v, (2, 3), (1, 0), (1, 2), (2, 1), 2),
        _deconvolved,
        (IMAGE, f(4, 3, 3, 2), f(6)),
    ),
    same("conv_transpose2d", T.conv_transpose2d, (IMAGE, f(4, 3, 2, 3)), None, 1, 3),
    same("conv_transpose2d", T.conv_transpose2d, (f(4, 3, 5), f(4, 3, 2, 3))),
    same("avg_pool2d", T.avg_pool2d, IMAGE, (2, 3)),
    same("avg_pool2d", T.avg_pool2d, f(4, 6, 8), (3, 2), (2, 3)),
    # what TensorRT-LLM ignores has no effect
    Case(
        "avg_pool2d",
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
        lambda x: T.avg_pool2d(x, 3, 2),
        (IMAGE,),
    ),
    same("interpolate", T.interpolate, IMAGE, [5, 20]),
    Case(
        "interpolate",
        lambda x: F.interpolate(x, [5, 20], mode="nearest-exact", antialias=True),
        lambda x: T.interpolate(x, [5, 20]),
        (IMAGE,),
    ),
    *(
        Case(
            "interpolate",
            lambda x, mode=mode: F.interpolate(x, [13, 4], None, mode, True),
            lambda x, mode=mode: T.interpolate(x, [13, 4], mode=mode),
            (IMAGE,),
        )
        for mode in ("bilinear", "bicubic")
    ),
    same("interpolate", T.interpolate, f("B", 2, 5), 12, mode="linear"),
    same("interpolate", T.interpolate, f("B", 2, 5), 12, mode="linear", align_corners=True),
    Case(
        "interpolate",
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        lambda x: T.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
        (IMAGE,),
    ),
]

SUMS = [*INDEXING, *REDUCTIONS, *PRODUCTS, *NORMS, *CONVOLUTIONS]
