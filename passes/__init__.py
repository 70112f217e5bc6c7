"""Transformations of modules: one file per pass, plus the registry."""

if __name__ != "irc.passes":
    raise ImportError("import irc.passes, not passes: a bare import loads a second copy")
