"""A tokenizer whose words w3, w4, ... are the tokens 3, 4, ..., for tests of texts."""

from pathlib import Path

import numpy as np


def write_word_tokenizer(folder: Path, size: int, template: str = "[CLS] $A [SEP]") -> None:
    """tokenizer.json with `size` tokens; `template` has the special ones around a text.

    It cuts and pads texts, as files of the hub do, which irc leaves to the model.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    special = ["[CLS]", "[PAD]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, size))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(word, vocabulary[word]) for word in special]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=1, pad_token="[PAD]", length=9)
    tokenizer.save(str(folder / "tokenizer.json"))


def random_texts(random: np.random.Generator, size: int, lengths: list[int]) -> list[str]:
    """A text of so many words for each length."""
    return [" ".join(f"w{token}" for token in random.integers(3, size, n)) for n in lengths]
