"""Checks that one module is consistent on many ranks at once."""

from __future__ import annotations

from ..ir.core import Module
from .replication import check_replication
from .stages import check_stages


def verify_spmd(module: Module) -> None:
    """An Error about the first inconsistency between the ranks of a verified module.

    All ranks run one text without branches, so that they communicate in one order, and stages
    communicate among their own ranks only, see `check_stages`. Local view: replicated values are
    equal, see `check_replication`; in the global view types ensure that, and an explicit module
    computes what its author wrote.
    """
    check_stages(module)
    if module.local and not module.explicit:
        check_replication(module)
