"""Checks that one module, run by many ranks at once, does what each of them may rely on."""

from __future__ import annotations

from ..core import Module
from .deadlock import check_ranks
from .replication import check_replication
from .stages import check_stages


def verify_spmd(module: Module) -> None:
    """An Error about the first thing that the ranks of a verified module would disagree on.

    Local view: what the ranks should have in common they have, see `check_replication`, and they
    communicate in the same order, see `check_ranks`. In the global view the types say the former
    and there is one order, so that only the stages of a pipeline are looked at.
    """
    check_stages(module)
    if module.local:
        check_replication(module)
        check_ranks(module)
