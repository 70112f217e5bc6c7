"""Finds what is wrong: the rewrite that breaks a module, a smaller module that fails, origins."""
