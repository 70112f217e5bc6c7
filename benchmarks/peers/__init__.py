"""The peers as small programs, each measured in its own process."""
