"""Fixtures of the tests of the TensorRT-LLM front end."""

import pytest

from .llamas import LLAMA, Llama, made


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """A tiny LLaMA of transformers, and its folder."""
    return made(tmp_path_factory.mktemp("llama"), LLAMA)
