"""The peers as small programs of their own, each run in a process that can be measured."""
