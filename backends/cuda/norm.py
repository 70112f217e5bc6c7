"""The kernel that follows a fused all-reduce in plugins: add_rms_norm of a plan."""

from __future__ import annotations

from functools import cache

from irc.backends.cuda.driver import LaunchNorm
from irc.backends.cuda.execute.launch import Enqueue, Kernels
from irc.backends.cuda.plan import Argument, Launch
from irc.backends.cuda.plan.build import Planner
from irc.errors import Error
from irc.text import parse_module

_TEXT = """module @norm dims(B=1:1:1073741824) {{
  func @norm(%x: {x}, %residual: {x}, %weight: {weight}) -> (normed: {x}, total: {x}) {{
    %n, %t = add_rms_norm %x, %residual, %weight {{eps={eps!r}, offset={offset!r}}} : {x}, {x}
    return %n, %t }} }}"""
_ALIGNED = 16  # bytes


@cache
def _planner(x: str, weight: str, eps: float, offset: float) -> Planner:
    return Planner(parse_module(_TEXT.format(x=x, weight=weight, eps=eps, offset=offset)))


def add_rms_norm(
    kernels: Kernels,
    dtype: str,
    weight_dtype: str,
    rows: int,
    columns: int,
    eps: float,
    offset: float = 0.0,
) -> LaunchNorm:
    """launch(x, residual, weight, normed, total, stream), for arrays [rows, columns] on this GPU.

    total = x + residual; normed = rms_norm of total. `normed` may lie where x does: a thread reads
    an element of x for the last time before it writes the same one of `normed`.
    """
    if not rows or not columns:
        return lambda *arguments: None
    types = f"{dtype}[B, {columns}]", f"{weight_dtype}[{columns}]"
    plan = _planner(*types, float(eps), float(offset)).plan({"B": rows})
    (launch,) = plan.steps
    assert isinstance(launch, Launch)
    kernels.load(plan.kernels.values())
    names = ("%x", "%residual", "%weight", "result.normed", "result.total")

    @cache
    def bound(*addresses: int) -> Enqueue:
        if any(address % _ALIGNED for address in addresses):
            raise Error(f"expected tensors at multiples of {_ALIGNED} bytes for rms_norm")
        places: dict[str, int] = dict(zip(names, addresses, strict=True))
        values = [places[a.buffer] if isinstance(a, Argument) else a for a in launch.arguments]
        return kernels.bind(launch, plan.kernels[launch.kernel], values, early=False)

    return lambda x, residual, weight, normed, total, stream: bound(
        x, residual, weight, normed, total
    )(stream)
