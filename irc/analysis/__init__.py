"""Analyses of modules: cost, memory, communication, and consistency between ranks."""
