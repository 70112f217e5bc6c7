"""Fuzzing of everything that reads what a user wrote."""
