"""Checks that one module is consistent on many ranks at once."""

from __future__ import annotations

from ..ir.core import Module
from .deadlock import check_ranks
from .replication import check_replication
from .stages import check_stages


def verify_spmd(module: Module) -> None:
    """An Error about the first inconsistency between the ranks of a verified module.

    Local view: replicated values are equal, see `check_replication`, and the ranks communicate in
    the same order, see `check_ranks`. In the global view types ensure the former and there is one
    order, so that only pipeline stages are checked. An explicit module computes what its author
    wrote, so that replication is not checked there.
    """
    check_stages(module)
    if module.local:
        if not module.explicit:
            check_replication(module)
        check_ranks(module)
