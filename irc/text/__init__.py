"""The textual form: print_module and parse_module are exact inverses."""

from .parser import parse_module
from .printer import print_function, print_module, print_op

__all__ = ["parse_module", "print_function", "print_module", "print_op"]
