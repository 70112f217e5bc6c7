"""Language models at run time: complete inputs, tokenizers, greedy decoding."""
