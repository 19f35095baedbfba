"""Fixtures over support.py; models and tokenizers are built per test, because an engine owns its model."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from support import ScriptedEngine, ToySearch, build_ambiguous_tokenizer, build_byte_tokenizer, build_tiny_model
from transformers import PreTrainedTokenizerFast

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def tiny_model() -> Any:
    return build_tiny_model()


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return build_byte_tokenizer()


@pytest.fixture
def ambiguous_tokenizer() -> PreTrainedTokenizerFast:
    return build_ambiguous_tokenizer()


@pytest.fixture
def toy_search() -> ToySearch:
    return ToySearch()


@pytest.fixture
def scripted_engine(byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., ScriptedEngine]:
    """`scripted_engine(["first turn", "second turn", ...])`: every row plays the same turns, one after the other."""

    def build(turns: Sequence[Any], tokenizer: Any = None, max_length: int = 4096) -> ScriptedEngine:
        played: dict[Hashable, int] = {}

        def play(key: Hashable, prompt_ids: list[int]) -> Any:
            played[key] = played.get(key, -1) + 1
            return turns[played[key]]

        return ScriptedEngine(tokenizer or byte_tokenizer, play, max_length)

    return build
