"""Fuzzing of the parser."""
