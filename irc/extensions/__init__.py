"""Extensions of irc: entry points of installed packages, and the user's Python files."""
