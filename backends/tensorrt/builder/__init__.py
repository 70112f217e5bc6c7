"""Builds engines in a process of their own, and reads what the builder says of them."""
