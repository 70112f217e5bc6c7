"""Thirty faults in checkpoints, passes and lowerings of three families of four layers.

They were written down before `irc compare` was run on any of them. `Fault.scope` is the layer, or
the component of it, in which the fault is, by its name in irc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from irc.ir.core import Op
from irc.ir.declare import REGISTRY, placeholder
from irc.pipeline.load import load_file
from tests.models.cases import SIZES, Case, cases
from tests.user_code import restored_registries

Tensors = dict[str, Any]
Edit = Callable[[Tensors], object]
PASSES_FILE = Path(__file__).with_name("broken_passes.py")
LAYERS = {"num_hidden_layers": 4}
BERT = cases("ENCODERS")["bert/ForMaskedLM"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": Case("llama", SIZES | LAYERS),
    "mixtral": Case("mixtral", SIZES | EXPERTS | LAYERS),
    "bert": replace(BERT, keys={**BERT.keys, **LAYERS}),
}


@dataclass(frozen=True)
class Fault:
    """One fault: an edit of the tensors of a checkpoint; a pass, as text; or what an operation has
    as an attribute when the backend onnx lowers it (operation, attribute, value).

    `options` are of irc.compile, for the side with the fault.
    """

    name: str
    family: str
    scope: str
    plant: Edit | str | tuple[str, str, Any]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> str:
        """checkpoint, pass or lowering."""
        kinds = {str: "pass", tuple: "lowering"}
        return kinds.get(type(self.plant), "checkpoint")

    @property
    def pipeline(self) -> str:
        """The passes with the broken one, behind localize where there are ranks."""
        sharded = ", shard, localize" if "mesh" in dict(self.options) else ""
        return f"inline, canonicalize, cse{sharded}, {self.plant}, dce"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The broken pass can be named, or the lowering is broken, in this block."""
        broken = _broken_lowering(self) if isinstance(self.plant, tuple) else nullcontext()
        with restored_registries(), broken:
            load_file(PASSES_FILE)
            yield


@contextmanager
def _broken_lowering(fault: Fault) -> Iterator[None]:
    from irc.backends.onnx.emitter import TABLE

    name, attribute, value = fault.plant  # type: ignore[misc]
    cls = REGISTRY[name]
    lower = TABLE.entries()[cls][0]

    def wrong(emitter: Any, op: Op) -> Any:
        changed = op
        if op.loc is not None and f"{op.loc.scope}.".startswith(f"{fault.scope}."):
            changed = placeholder(op, op.operands)
            changed.results = op.results
            setattr(changed, attribute, value)
        return lower(emitter, changed)

    with mock.patch.dict(TABLE._table, {cls: wrong}):
        yield


def exchange(path: str, a: str, b: str) -> Edit:
    """Two weights exchange their numbers."""
    a, b = f"{path}.{a}.weight", f"{path}.{b}.weight"
    return lambda tensors: tensors.update({a: tensors[b], b: tensors[a]})


def change(key: str, changed: Callable[[Any], Any]) -> Edit:
    """Other numbers in one tensor."""
    return lambda tensors: tensors.update({key: np.ascontiguousarray(changed(tensors[key]))})


def copy(source: str, target: str) -> Edit:
    """All tensors below one path become those below another."""
    return lambda tensors: tensors.update(
        {key: tensors[key.replace(target, source)] for key in tensors if key.startswith(target)}
    )


def edits(*several: Edit) -> Edit:
    """Several edits."""
    return lambda tensors: [edit(tensors) for edit in several]


def interleaved(rows: Any) -> Any:
    """Rows of heads of 12, the halves of each head in turn, as rope without NeoX has them."""
    return rows.reshape(-1, 2, 6, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def with_nan(x: Any) -> Any:
    """One NaN."""
    return np.where(np.arange(x.size).reshape(x.shape) == 149, np.float32("nan"), x)


def attribute(op: str, scope: str, name: str, value: float) -> str:
    """The pass broken-attribute."""
    return f'broken-attribute{{op="{op}", scope="{scope}", attribute="{name}", value={value}}}'


def activation(op: str, scope: str, other: str) -> str:
    """The pass broken-activation."""
    return f'broken-activation{{op="{op}", scope="{scope}", other="{other}"}}'


TP2, PP2, BF16 = (("mesh", "tp=2"),), (("mesh", "pp=2"),), (("dtype", "bf16"),)
W4 = (("quantize", "w4a16"), ("group", 16))
L0, L1, L2, L3 = (f"model.layers.{i}" for i in range(4))
E0, E1, E2, E3 = (f"encoder.layers.{i}" for i in range(4))
B1, B2, B3 = (f"bert.encoder.layer.{i}" for i in (1, 2, 3))
Q, K, X = "self_attn.q_proj.weight", "self_attn.k_proj.weight", "block_sparse_moe"
POSITIONS = "bert.embeddings.position_embeddings.weight"
QUERY = f"{B3}.attention.self.query.weight"
NORM = "attention.output.LayerNorm"
ROPE_IN_QK = edits(change(f"{L3}.{Q}", interleaved), change(f"{L3}.{K}", interleaved))
EXPERTS_1_3 = edits(*(exchange(f"{L1}.{X}.experts", f"1.w{i}", f"3.w{i}") for i in (1, 2, 3)))
LOSES_RESIDUAL = f'broken-fuse-norm{{scope="{L1}.post_attention_layernorm"}}'
OUT_NORM = f"{E2}.attention_output_norm"

FAULTS = [
    Fault("gate and up", "llama", f"{L2}.mlp", exchange(f"{L2}.mlp", "gate_proj", "up_proj")),
    Fault("gate and up", "llama", f"{L1}.mlp", exchange(f"{L1}.mlp", "gate_proj", "up_proj"), TP2),
    Fault("rope layout of q", "llama", f"{L1}.self_attn", change(f"{L1}.{Q}", interleaved)),
    Fault("rope layout of q and k", "llama", f"{L3}.self_attn", ROPE_IN_QK, PP2),
    Fault(
        *("a norm scaled", "llama", f"{L2}.input_layernorm"),
        change(f"{L2}.input_layernorm.weight", lambda x: x * np.float32(1.05)),
    ),
    Fault(
        *("o_proj transposed", "llama", f"{L0}.self_attn"),
        change(f"{L0}.self_attn.o_proj.weight", np.transpose),
    ),
    Fault("mlp of another layer", "llama", f"{L3}.mlp", copy(f"{L2}.mlp", f"{L3}.mlp"), W4),
    Fault(
        *("a NaN in a weight", "llama", f"{L1}.self_attn.v_proj"),
        change(f"{L1}.self_attn.v_proj.weight", with_nan),
    ),
    Fault("two experts exchanged", "mixtral", f"{L1}.{X}", EXPERTS_1_3),
    Fault("w1 and w3", "mixtral", f"{L2}.{X}", exchange(f"{L2}.{X}.experts.0", "w1", "w3")),
    Fault(
        *("rows of the router exchanged", "mixtral", f"{L3}.{X}.gate"),
        change(f"{L3}.{X}.gate.weight", lambda x: x[[1, 0, 2, 3]]),
    ),
    Fault(
        *("values negated", "mixtral", f"{L0}.self_attn.v_proj"),
        *(change(f"{L0}.self_attn.v_proj.weight", np.negative), BF16),
    ),
    Fault(
        *("a bias negated", "bert", f"{E1}.mlp"),
        change(f"{B1}.intermediate.dense.bias", np.negative),
    ),
    Fault("norm of another layer", "bert", OUT_NORM, copy(f"{B3}.{NORM}", f"{B2}.{NORM}")),
    Fault("q transposed", "bert", f"{E3}.self_attn", change(QUERY, np.transpose), TP2),
    Fault(
        *("positions moved", "bert", "encoder.embed_positions"),
        change(POSITIONS, lambda x: np.roll(x, 1, 0)),
    ),
    Fault("fuse-norm loses the residual", "llama", L1, LOSES_RESIDUAL),
    Fault(
        *("fuse-gated-mlp exchanges weights", "llama", f"{L2}.mlp"),
        f'broken-fuse-gated-mlp{{scope="{L2}"}}',
    ),
    Fault("an addition folded away", "llama", L3, f'broken-fold{{scope="{L3}"}}'),
    Fault(
        *("attention sees later tokens", "llama", f"{L0}.self_attn"),
        attribute("attention", L0, "causal", 0.0),
    ),
    Fault(
        *("a mean in place of a sum over ranks", "llama", f"{L1}.mlp"),
        *(f'broken-all-reduce{{scope="{L1}.mlp"}}', TP2),
    ),
    Fault("base of rope", "mixtral", f"{L2}.self_attn", attribute("rope", L2, "theta", 10000.0)),
    Fault("sigmoid for softmax", "mixtral", f"{L1}.{X}", activation("softmax", L1, "sigmoid")),
    Fault("gelu for silu", "mixtral", f"{L0}.{X}", activation("silu", L0, "gelu")),
    Fault("epsilon of a norm", "bert", OUT_NORM, attribute("layer_norm", OUT_NORM, "eps", 0.1)),
    Fault("attention scale", "bert", f"{E3}.self_attn", attribute("attention", E3, "scale", 0.1)),
    Fault("epsilon", "llama", f"{L2}.post_attention_layernorm", ("rms_norm", "eps", 0.1)),
    Fault("no causal mask", "llama", f"{L1}.self_attn", ("attention", "causal", False)),
    Fault("axis of softmax", "mixtral", f"{L1}.{X}", ("softmax", "dim", 0)),
    Fault("gelu by tanh", "bert", f"{E0}.mlp", ("gelu", "approximate", "tanh")),
]
