import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.models import letter_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer()


@pytest.fixture
def make_tokenizer():
    return letter_tokenizer
