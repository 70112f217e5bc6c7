"""The reference backend: every operation in numpy, all ranks in one process."""

from .evaluate import evaluate, evaluate_ranks
from .program import ReferenceBackend, ReferenceProgram

backend = ReferenceBackend()

__all__ = ["ReferenceBackend", "ReferenceProgram", "backend", "evaluate", "evaluate_ranks"]
