import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter_tokenizer(single: str | None = "<s> $A", eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    """One token per letter: <s> is 0, </s> is 1, "a" is 2 ...; anything else is <unk> 28; ``single`` adds specials."""
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: 2 + index for index, letter in enumerate(LETTERS)} | {"<unk>": 28}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, unk_token="<unk>")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer()


@pytest.fixture
def make_tokenizer():
    return letter_tokenizer
