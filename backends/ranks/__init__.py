"""What all that run several ranks share: communicators, health check, launching, inputs, shards."""
