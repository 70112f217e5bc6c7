"""Language models at run time: inputs that follow from others, tokenizers, greedy decoding."""
