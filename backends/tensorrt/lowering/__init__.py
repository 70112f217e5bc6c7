"""What every operation becomes for a target, and the emitter that writes it."""
