"""`register`: the operations of torch.ops with which scripts of TensorRT-LLM quantize weights.

Stored bytes are in the order that `checkpoints/mixed_gemm.py` says, which weight-only layers read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from ..checkpoints.mixed_gemm import pack, quantize_columns

Operation: TypeAlias = Callable[..., Any]


def register() -> None:
    """Give an imported torch the operations that its `torch.ops` lacks."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "ops") or "_filled_by_irc" in vars(torch.ops):
        return
    for namespace in ("fastertransformer", "trtllm"):
        _fill(getattr(torch.ops, namespace), _weights(torch))
    _fill(torch.ops.tensorrt_llm, _e4m3(torch))
    torch.ops._filled_by_irc = True


def _fill(namespace: Any, operations: dict[str, Operation]) -> None:
    for name, operation in operations.items():
        if not hasattr(namespace, name):
            setattr(namespace, name, operation)


def _weights(torch: Any) -> dict[str, Operation]:
    """The operations on weights [..., K, N] of INT8, and of INT4, of which a byte holds two."""

    def bits_of(kind: Any) -> int:
        return 4 if kind is torch.quint4x2 else 8

    def codes_of(packed: Any) -> Any:
        low, high = packed << 4 >> 4, packed >> 4
        return torch.stack((low, high), -1).flatten(-2)

    def packed(codes: Any) -> Any:
        return (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)

    def processed(codes: Any, bits: int) -> Any:
        return torch.from_numpy(pack(codes.cpu().numpy(), bits))

    def quantize(weight: Any, kind: Any) -> Any:
        bits = bits_of(kind)
        codes, scales = quantize_columns(weight.detach().cpu().float().numpy(), bits)
        plain = torch.from_numpy(codes)
        scales = torch.from_numpy(scales).to(weight.dtype)
        return plain if bits == 8 else packed(plain), processed(plain, bits), scales

    def preprocess(weight: Any, kind: Any, *_: Any) -> Any:
        bits = bits_of(kind)
        return processed(weight if bits == 8 else codes_of(weight), bits)

    return {
        "symmetric_quantize_last_axis_of_batched_matrix": lambda *given: quantize(*given)[1:],
        "_symmetric_quantize_last_axis_of_batched_matrix": quantize,
        "preprocess_weights_for_mixed_gemm": preprocess,
        "pack_int8_tensor_to_packed_int4": packed,
        "unpack_int4_packed_tensor_to_int8": codes_of,
    }


def _e4m3(torch: Any) -> dict[str, Operation]:
    """The operations on FP8, whose codes have the type i8.

    There is a scale per row, per column, or one in all.
    """

    def quantize(x: Any, dims: tuple[int, ...]) -> Any:
        scale = x.float().abs().amax(dims or tuple(range(x.ndim)), keepdim=True) / 448.0
        scale = scale.clamp(min=1 / (448.0 * 512)).to(x.dtype)
        codes = (x.float() / scale.float()).clamp(-448.0, 448.0)
        return codes.to(torch.float8_e4m3fn).view(torch.int8), scale

    def dequantize(codes: Any, scale: Any) -> Any:
        values = codes.view(torch.float8_e4m3fn).float() * scale.float()
        return values.to(scale.dtype)

    operations: dict[str, Operation] = {}
    for name, dims in (("activation", (-1,)), ("weight", (-2,)), ("per_tensor", ())):
        operations[f"quantize_e4m3_{name}"] = partial(quantize, dims=dims)
        operations[f"dequantize_e4m3_{name}"] = dequantize
    return operations
