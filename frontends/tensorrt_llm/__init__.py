"""Scripts written for TensorRT-LLM, traced into irc: the names of both of its dialects."""
