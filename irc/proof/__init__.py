"""Proofs that a module computes what another computes, and certificates of passes."""

from .certificate import Certificate
from .certify import certify, prove_passes
from .prove import prove

__all__ = ["Certificate", "certify", "prove", "prove_passes"]
