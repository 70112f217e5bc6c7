"""`register`: the operations of torch.ops with which scripts of TensorRT-LLM quantize weights.

Stored bytes are in the order that `checkpoints/mixed_gemm.py` says, which weight-only layers read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from ..checkpoints.mixed_gemm import pack, quantize_columns
from .errors import ScriptError

Operation: TypeAlias = Callable[..., Any]


def register() -> None:
    """Give an imported torch the operations that its `torch.ops` lacks."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "ops") or "_filled_by_irc" in vars(torch.ops):
        return
    for namespace in ("fastertransformer", "trtllm"):
        _fill(getattr(torch.ops, namespace), _weights(torch))
    kinds = ("activation", "weight", "per_tensor")
    names = [f"{verb}_e4m3_{kind}" for verb in ("quantize", "dequantize") for kind in kinds]
    _fill(torch.ops.tensorrt_llm, dict.fromkeys(names, _refuse))
    torch.ops._filled_by_irc = True


def _fill(namespace: Any, operations: dict[str, Operation]) -> None:
    for name, operation in operations.items():
        if not hasattr(namespace, name):
            setattr(namespace, name, operation)


def _weights(torch: Any) -> dict[str, Operation]:
    """The operations on weights [..., K, N] of INT8, and of INT4, of which a byte holds two."""

    def quantize(weight: Any, kind: Any) -> Any:
        """(plain codes, those in the order of kernels, scales)"""
        bits = 4 if kind is torch.quint4x2 else 8
        codes, scales = quantize_columns(weight.detach().cpu().float().numpy(), bits)
        stored, plain = torch.from_numpy(pack(codes, bits)), torch.from_numpy(codes)
        if bits == 4:
            plain = (plain[..., ::2] & 15) | (plain[..., 1::2] << 4)
        return plain, stored, torch.from_numpy(scales).to(weight.dtype)

    return {
        "symmetric_quantize_last_axis_of_batched_matrix": lambda *given: quantize(*given)[1:],
        "_symmetric_quantize_last_axis_of_batched_matrix": quantize,
        "preprocess_weights_for_mixed_gemm": _refuse,
        "pack_int8_tensor_to_packed_int4": _refuse,
        "unpack_int4_packed_tensor_to_int8": _refuse,
    }


def _refuse(*_: Any) -> None:
    raise ScriptError(
        "codes of AWQ, GPTQ and FP8 are not supported in scripts; give the folder to irc compile "
        "FOLDER, which reads such codes, or makes them with --quantize SCHEME"
    )
