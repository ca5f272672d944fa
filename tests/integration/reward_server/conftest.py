"""Two reward servers: one with the model of the shared critic server, one that reads characters and wants a token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import save_reward_model
from tests.support.reward_server import RewardServer

CHARACTERS = ["<end>", *" w0123456789"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, reward_model: Path, backend: str) -> Iterator[RewardServer]:
    """Serves the reward model of the shared critic server."""
    folder = tmp_path_factory.mktemp("reward_server")
    server = RewardServer(folder, reward_model, [f"run.output_dir={folder}/outputs"], backend=backend).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardServer]:
    """Reads characters where the policy reads words; wants a token."""
    folder = tmp_path_factory.mktemp("letters")
    model = save_reward_model(folder / "model", seed=5, vocab_size=len(CHARACTERS), max_position_embeddings=256)
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(CHARACTERS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<end>").save_pretrained(model)
    (folder / "token").write_text("open sesame\n")
    (folder / "wrong").write_text("open barley\n")
    server = RewardServer(folder, model, [f"server.token.token_file={folder}/token"]).start()
    yield server
    server.close()
