"""The writing process decodes as the tokenizer does, and without transformers wherever it can."""

import pickle
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nemo_style_rlhf.models.decoding import decoder_loader
from tests.support.models import save_tokenizer
from tests.support.paths import ROOT

TEXT = "Grüße , n't 'm <s> 日本 \U0001f600 x ."


def byte_level(**settings: object) -> PreTrainedTokenizerFast:
    """A vocabulary of single bytes, with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>", **settings)
    tokenizer.add_tokens(["日本"])
    return tokenizer


class Shouting(PreTrainedTokenizerFast):
    def decode(self, *args: object, **settings: object) -> str:
        return super().decode(*args, **settings).upper()


@pytest.mark.parametrize("cleans", [False, True])
def test_it_decodes_as_the_tokenizer_does(tmp_path, cleans):
    tokenizer = byte_level(
        clean_up_tokenization_spaces=cleans,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.encode(TEXT) + [tokenizer.eos_token_id, 0, 1]
    decode = pickle.loads(pickle.dumps(decoder_loader(tokenizer, str(tmp_path), trust_remote_code=False)))()
    assert decode(tokens) == tokenizer.decode(tokens)
    assert (TEXT in decode(tokens)) != cleans


def test_a_tokenizer_that_does_more_than_its_backend_is_loaded_whole(tmp_path):
    save_tokenizer(tmp_path)
    plain, more = AutoTokenizer.from_pretrained(tmp_path), Shouting.from_pretrained(tmp_path)
    assert decoder_loader(plain, str(tmp_path), trust_remote_code=False).args[0].startswith("{")
    assert decoder_loader(more, str(tmp_path), trust_remote_code=False).args == (str(tmp_path), False)


def test_neither_transformers_nor_torch_is_imported(tmp_path):
    save_tokenizer(tmp_path)
    load = decoder_loader(AutoTokenizer.from_pretrained(tmp_path), str(tmp_path), trust_remote_code=False)
    (tmp_path / "load.pickle").write_bytes(pickle.dumps(load))
    program = (
        "import pickle, sys\nprint(pickle.load(open(sys.argv[1], 'rb'))()([5, 6]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "load.pickle")]
    assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
