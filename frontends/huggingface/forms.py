"""Checkpoints in another form: weights that are parts of other tensors than the model names."""

from __future__ import annotations

from collections.abc import Mapping

from ...core import Module
from ...weights import Ref, UnboundRef
from .files import Checkpoint


def use_form(module: Module, checkpoint: Checkpoint, refs: Mapping[str, Ref]) -> None:
    """Point the weights of `refs` at tensors that the checkpoint has instead of their own.

    A weight stays as it is where the checkpoint lacks a tensor of the reference, which `bind`
    then reports by the name that the model gives it.
    """
    for name, ref in refs.items():
        keys = [source.key for source in ref.sources() if isinstance(source, UnboundRef)]
        if name in module.weights and all(key in checkpoint for key in keys):
            module.weights[name].ref = ref
