"""Helpers of several passes: edits in place, local versions of operations, rows of tables."""
