"""Ranks as processes without MPI: a hub passes their messages on and sees who is gone.

The hub is a thread of the irc that started the processes, or of rank 0 where torchrun or Slurm did.
It carries what is small: names of NCCL groups, facts to agree on, results of ranks on CPU.
"""
