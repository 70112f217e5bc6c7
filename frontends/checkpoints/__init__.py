"""Readers of the checkpoint folders of other tools."""
