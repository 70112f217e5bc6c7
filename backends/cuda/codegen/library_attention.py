"""Which attention cuDNN computes: that of many queries, as in prefill, where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

from irc import ops
from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, exact_divide
from irc.ir.types import TensorType

from ..plan.template import CallTemplate, Fused, Settings, Sizes, Template, fusion
from .body import Body
from .kernels import blocks, each_thing, launch, number

QUERIES = 1024  # fewer do not repay the making of a plan by cuDNN, about a second per length
_DTYPES = ("f16", "bf16")
_LARGEST_HEAD = 128


def is_installed() -> bool:
    """Whether cuDNN and its package for Python are installed."""
    try:
        return all(find_spec(name) for name in ("cudnn", "nvidia.cudnn"))
    except ModuleNotFoundError:  # there is no package nvidia
        return False


@fusion(ops.Attention, order=-1)
def library_attention(op: Op, sizes: Sizes) -> Fused | str | None:
    """The call of cuDNN for an attention, or why there is none."""
    assert isinstance(op, ops.Attention)
    if number(op.q.type.shape[1], sizes) < QUERIES:
        return None
    refusal = _refusal(op, sizes)
    if refusal:
        return f"attention by cuDNN: {refusal}"
    call = _call(op)
    if not _has_lengths(op):
        return Fused((call,), (op,))
    return Fused((_lengths(op, *call.reads[3:]), call), (op,))


def _refusal(op: ops.Attention, sizes: Sizes) -> str:
    """Why cuDNN is not asked; empty if it is."""
    if not is_installed():
        return "it is not installed; pip install 'irc-compiler[cudnn]'"
    if op.q.type.dtype not in _DTYPES:
        return f"it takes {', '.join(_DTYPES)}, not {op.q.type.dtype}"
    taken = {"bias": op.bias, "mask": op.mask, "lengths": op.lengths}
    options = [name for name, value in taken.items() if value is not None]
    options += [name for name in ("window", "softcap") if getattr(op, name)]
    if options:
        return f"it is not asked for {', '.join(options)}"
    shape = {name: number(size, sizes) for name, size in _sizes(op).items()}
    for size in (shape["head"], shape["value"]):
        if size % 8 or size > _LARGEST_HEAD:
            return f"heads are multiples of 8 up to {_LARGEST_HEAD}, not {size}"
    if op.causal and op.past is None and shape["queries"] > shape["keys"]:
        return "some queries see no keys"
    return "" if shape["batch"] and shape["keys"] else "there are no keys"


def _has_lengths(op: ops.Attention) -> bool:
    """Whether the position of queries is known on the GPU only."""
    return op.causal and op.past is not None


def _sizes(op: ops.Attention) -> dict[str, DimLike]:
    """Numbers of sequences, query heads, key heads, queries and keys; sizes of heads."""
    batch, queries, features = op.q.type.shape
    keys = op.k.type.shape[2 if op.cached else 1]
    heads = exact_divide(features, op.head_dim)
    assert heads is not None  # the operation's types say so
    value = exact_divide(op.result.type.shape[2], heads)
    assert value is not None
    return {
        "batch": batch,
        "heads": heads,
        "key_heads": op.key_heads,
        "queries": queries,
        "keys": keys,
        "head": op.head_dim,
        "value": value,
    }


def _call(op: ops.Attention) -> CallTemplate:
    reads = [op.q, op.k, op.v]
    if _has_lengths(op):
        kind = TensorType("i32", op.q.type.shape[:1])
        reads += [Value(kind, None, 0, f"{name}_lengths") for name in ("query", "key")]

    def settings(sizes: Sizes) -> Settings:
        numbers = {name: number(size, sizes) for name, size in _sizes(op).items()}
        words = {"cached": int(op.cached), "causal": int(op.causal), "scale": op.score_scale}
        return {"dtype": op.q.type.dtype, **numbers, **words}

    return CallTemplate(
        "cudnn", "attention", tuple(reads), (op.result,), settings, operations=(op,)
    )


def _lengths(op: ops.Attention, queries: Value, keys: Value) -> Template:
    """The launch that computes how many queries and keys a sequence has."""
    assert op.past is not None
    batch, tokens = op.q.type.shape[:2]
    body = Body([op.past])
    total = body.variable("const ix", body.size(batch))
    with body.block(each_thing(total)):
        count = body.variable("const int", f"(int)({body.size(tokens)})")
        body.line(f"store<i32>(out0, i, {count});")
        body.line(f"store<i32>(out1, i, {body.element(op.past, ['i'])} + {count});")
    return launch("lengths", body, (queries, keys), blocks(batch), operations=(op,))
