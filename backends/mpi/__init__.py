"""Ranks as processes over MPI: a communicator that never hangs, and how a world of ranks starts."""
