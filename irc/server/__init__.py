"""The server: many requests at once over the rows of one compiled program, and its interfaces."""
