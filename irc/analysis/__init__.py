"""Analyses of modules: costs, memory, communication, and what must hold between the ranks."""
