"""Sharding plans: rows of patterns and axes, of which the first that matches a name decides.

Arguments of the main function are matched as well. The word `megatron` stands for the default rows.
"""

from __future__ import annotations

import os
from dataclasses import replace
from glob import escape
from pathlib import Path

from irc.errors import Error
from irc.files import open_file
from irc.ir.core import Module
from irc.json_files import read_object
from irc.pipeline import Compilation

from ..shared.parameters import weights_of
from .even_blocks import Product
from .rows import Row, find_row, row
from .tp_plan import styled_rows, tp_plan_in

COLUMN = (
    "q_proj k_proj v_proj qkv_proj q k v wq wk wv wqkv Wqkv query key value query_key_value c_attn "
    "q_b_proj kv_b_proj gate_proj up_proj gate_up_proj fc1 fc_in c_fc w1 w3 wi wi_0 wi_1 "
    "dense_h_to_4h intermediate.dense lm_head embed_out"
)
ROW = "o_proj out_proj c_proj o wo down_proj fc2 fc_out w2 dense dense_4h_to_h attn_out"
POSITION = (
    "wpe position_embeddings position_embedding embed_positions token_type_embeddings pos_emb "
    "pos_embed segment_embeddings"
)
EMBEDDING = "embed_tokens wte word_embeddings tok_embeddings embedding embed embed_in"
DEFAULT = "megatron"
ENDS = ("lm_head", "embed_out", *EMBEDDING.split())


def plan_of(compilation: Compilation) -> str:
    """The plan that a compilation names, else the config.json with a tp_plan, else ""."""
    if "plan" in compilation.options:
        plan: str | os.PathLike[str] = compilation.options["plan"]
        return os.fspath(plan)
    path = compilation.config_path
    return path if tp_plan_in(dict(compilation.config), path) else ""


def megatron() -> list[Row]:
    """Column-parallel into a block, row-parallel out of it, vocabulary-parallel at both ends.

    Shoeybi et al., 2019. Experts go over ep, and over tp within. What lookups alone use is a table
    of embeddings, whatever it is called.
    """
    rows = [
        row("*experts.gate 0@ep, 1@tp", "megatron: experts, column-parallel"),
        row("*experts.up 0@ep, 1@tp", "megatron: experts, column-parallel"),
        row("*experts.down 0@ep, 2@tp", "megatron: experts, row-parallel"),
    ]
    rows += _named(COLUMN, "0@tp", "0@tp", "column-parallel")
    rows += _named(ROW, "1@tp", "replicated", "row-parallel")
    rows += _named(EMBEDDING, "0@tp", "replicated", "vocabulary-parallel")
    tables = _named(POSITION, "replicated", "replicated", "positions, on every rank")
    tables.append(row("* 0@tp", "megatron: vocabulary-parallel, as only lookups use it"))
    return [*rows, *(replace(each, tables=True) for each in tables)]


def _named(modules: str, weight: str, bias: str, source: str) -> list[Row]:
    """Rows for the parameters of all modules of some names, wherever they are."""
    return [
        row(f"{prefix}{module}.{parameter}* {axes}", f"megatron: {source}")
        for module in modules.split()
        for prefix in ("", "*.")
        for parameter, axes in (("weight", weight), ("bias", bias))
    ]


def plan_rows(plan: str, module: Module) -> list[Row]:
    """The rows of a plan, megatron or the path of a file, for a module.

    Names of modules decide about matrices [out, in]. One that a product takes as [in, out] gets a
    row of its own, with these dimensions exchanged; rows that a user wrote are taken as they are.
    """
    rows, turned = read_plan(plan), dict[str, Row]()
    for product in filter(None, map(Product.of, module.ops())):
        if product.inputs > product.outputs:
            continue
        dims = {product.inputs: product.outputs, product.outputs: product.inputs}
        for weight in weights_of(product.parameter) or ():
            row = find_row(rows, weight.name)
            if row and not row.must_fit and weight.type.ndim == product.parameter.type.ndim:
                splits = tuple((dims.get(dim, dim), axes) for dim, axes in row.splits)
                turned[weight.name] = replace(row, pattern=escape(weight.name), splits=splits)
    return [*turned.values(), *rows]


def read_plan(path: str) -> list[Row]:
    """The rows of a file: lines of text (# begins a comment), or JSON with a Hugging Face tp_plan.

    JSON is a tp_plan itself or a config.json that has one. The name `DEFAULT` is no file.
    """
    if path == DEFAULT:
        return megatron()
    if path.endswith(".json"):
        return _from_json(path)
    try:
        with open_file(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Error(
            f"cannot read the plan {path}: {error}; a plan is megatron, or a file of rows such as "
            "*.q_proj.weight 0@tp"
        ) from None
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if line == DEFAULT:
            rows += megatron()
        elif line:
            rows.append(replace(row(line, f"{path}:{number}"), must_fit=True))
    if not rows:
        raise Error(f"the plan {path} has no rows; write some such as *.q_proj.weight 0@tp")
    return rows


def _from_json(path: str) -> list[Row]:
    table = read_object(Path(path), "the plan")
    if not table:
        raise Error(f"the plan {path} is no table of module patterns")
    plan = tp_plan_in(table, path)
    if plan is None and "model_type" in table:
        raise Error(f"{path} has no tp_plan (base_model_tp_plan); give another plan, or megatron")
    # a tp_plan of a base model omits the ends of the whole model: they get the default rows
    ends = [r for r in megatron() if r.tables or any(f"{end}." in r.pattern for end in ENDS)]
    return [*styled_rows(plan or table, path), *ends]


__all__ = ["DEFAULT", "Row", "megatron", "plan_of", "plan_rows", "read_plan"]
