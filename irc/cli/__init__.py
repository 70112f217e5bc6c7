"""The command line: `irc compile`, `irc run` and the others, one file each."""
