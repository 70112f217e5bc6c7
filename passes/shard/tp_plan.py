"""Tensor-parallel plans of Hugging Face transformers: a style per module or parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

from irc.errors import Error, did_you_mean

from .rows import Row, row

_KEYS = ("base_model_tp_plan", "tp_plan")


class _Style(NamedTuple):
    """The meaning of a style for the matrices of a module and for its bias."""

    weight: str
    bias: str
    stacked: str  # for parameters of [experts, out, in]


_COLUMN = _Style("0@tp", "0@tp", "0@ep, 1@tp")
_ROW = _Style("1@tp", "replicated", "0@ep, 2@tp")
_REPLICATED = _Style("replicated", "replicated", "replicated")
# None: what the style does to activations follows from the splits of weights here.
_STYLES: dict[str, _Style | None] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), _COLUMN),
    **dict.fromkeys(("local_colwise", "local_packed_colwise"), _COLUMN),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"), _ROW),
    **dict.fromkeys(("local_rowwise", "local_packed_rowwise"), _ROW),
    "embedding_rowwise": _Style("0@tp", "replicated", "replicated"),
    "embedding_colwise": _Style("1@tp", "replicated", "replicated"),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce"), _REPLICATED),
    **dict.fromkeys(("sequence_parallel", "mla_kv_a_proj"), _REPLICATED),
    **dict.fromkeys(("all_reduce", "gather", "local", "local_params"), None),
    **dict.fromkeys(("moe_identity_expert", "moe_tp_experts"), None),
}
# The parameters of all experts of a layer: their names there, and in models of irc.
_STACKED = {
    "gate_up_proj": ("gate", "up", "gate_up_proj"),
    "gate_proj": ("gate", "gate_proj"),
    "up_proj": ("up", "up_proj"),
    "down_proj": ("down", "down_proj"),
}


def tp_plan_in(config: dict[str, Any], path: str) -> dict[str, str] | None:
    """The tp_plan in the content of a config.json, if any; `path` is for messages."""
    for key in _KEYS:
        found = config.get(key)
        if found is not None and not isinstance(found, dict):
            raise Error(
                f"{path}: {key} is {found!r}, but it must be a table from modules to styles, such "
                'as {"layers.*.mlp.down_proj": "rowwise"}'
            )
        if found:
            return cast("dict[str, str]", found)
    return None


def styled_rows(table: dict[str, Any], path: str) -> list[Row]:
    """The rows of a table from modules to styles; `path` is for messages."""
    return [
        replace(row, entry=f"{module}: {style}")
        for module, style in table.items()
        for row in _styled(module, style, path)
    ]


def _styled(module: str, name: Any, path: str) -> Iterator[Row]:
    if not isinstance(name, str) or name not in _STYLES:
        hint = did_you_mean(name, _STYLES) if isinstance(name, str) else ""
        raise Error(f"the plan {path} has an unknown style {name!r} for {module}{hint}")
    style, source = _STYLES[name], f"{path}: {name}"
    if style is None:
        return
    parent, _, last = module.rpartition(".")
    if parent.endswith("experts") and last in _STACKED:
        for own in _STACKED[last]:
            yield row(f"*experts.{own} {style.stacked}", source)
    # a plan names modules from the base model on, which is often a part of the traced one
    for prefix in ("", "*."):
        yield row(f"{prefix}{module}.weight* {style.weight}", source)
        yield row(f"{prefix}{module}.bias* {style.bias}", source)
        if style is not _ROW:
            yield row(f"{prefix}{module} {style.weight}", source)  # a parameter by itself
