"""Tiny Llama, Mixtral, BERT and DLRM, and the modules between the passes of their pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from irc.driver.history import history_of
from irc.driver.sources import find_source
from irc.frontends import random_weights
from irc.frontends.models import find_family
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline.instruments.history import History
from tests.sharded.models import mixtral, tiny_llama

RECOMMENDER = Path(__file__).parents[2] / "examples" / "recommender"
BERT: Mapping[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 22,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "num_labels": 3,
}


def bert() -> Module:
    """A BERT of two layers that classifies."""
    family = find_family(BERT)
    return random_weights(family.trace(family.read_config(BERT), "f32"), 6)


def dlrm() -> Module:
    """The DLRM of the examples, with its table of keys."""
    script = str(RECOMMENDER.with_suffix(".py"))
    return find_source(script, checkpoint=RECOMMENDER).module


MODELS: dict[str, Callable[[], Module]] = {
    "llama": lambda: tiny_llama(num_hidden_layers=2),
    "mixtral": mixtral,
    "bert": bert,
    "dlrm": dlrm,
}
MESHES = ("tp=2", "tp=3", "pp=2")
PASSES = (
    "inline, canonicalize, cse, fuse-gated-mlp, fuse-linears, shard, rewrite-embeddings, "
    "fuse-collectives, pipeline, localize, fuse-collectives{norm=true}, cse, fold, dce"
)


@cache
def history(name: str, mesh: str) -> History:
    """The passes over a model for a mesh."""
    module = MODELS[name]()
    module.mesh = Mesh.parse(mesh)
    return history_of(module, PASSES)
