"""The reference model where it rests in host memory, and references that cannot be compared."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import load_causal_lm, load_tokenizer
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.reference import FrozenCopy, require_comparable
from nemo_style_rlhf.schema.actor import PolicyConfig
from nemo_style_rlhf.schema.common import EngineConfig
from tests.support.addresses import addresses, addresses_in_use
from tests.support.models import SHAPE, letter_tokenizer, save_policy

pytestmark = pytest.mark.usefixtures("copying_device")
CPU = torch.device("cpu")
TOKENS, LENGTHS = torch.arange(1, 9), [5, 3]


def test_an_offloaded_reference_is_on_the_device_only_while_it_computes():
    model = PolicyModel(LlamaForCausalLM(LlamaConfig(**SHAPE)), temperature=1.0)
    host, used = addresses(model), addresses_in_use(model)
    reference = FrozenCopy(model, EngineConfig(), CPU, Ranks(), cpu_offload=True)
    for _ in range(2):
        assert reference.logprobs(TOKENS, LENGTHS, torch.ones(8)).all()
        assert addresses(model) == host
    assert len(used) == 2 and not set(used[0] + used[1]) & set(host)


def test_a_reference_has_the_policys_tokenizer_and_knows_its_sequences(tmp_path: Path):
    policy = save_policy(tmp_path / "policy")
    letters = save_policy(tmp_path / "letters")
    letter_tokenizer().save_pretrained(letters)
    bare = save_policy(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    no_config = save_policy(tmp_path / "no_config")
    (no_config / "config.json").write_text('{"model_type": "unheard_of"}')

    def check(reference: object, length: int = 128) -> None:
        config = PolicyConfig(path=str(policy), dtype="float32", reference_path=reference and str(reference))
        require_comparable(config, load_tokenizer(str(policy)), load_causal_lm(config), length)

    for accepted in (
        None,
        policy,
        save_policy(tmp_path / "padded", vocab_size=72, num_hidden_layers=1, max_position_embeddings=256),
    ):
        check(accepted)
    for reference, said in (
        (letters, "letters has another tokenizer than model.path=.*policy, and KL compares both token by token: give"),
        (bare, "bare holds no tokenizer"),
        (no_config, "no_config .* that transformers .*"),
        (save_policy(tmp_path / "small", vocab_size=63), "small has a vocabulary of 63 ids but .*policy may sample 64"),
        (save_policy(tmp_path / "short", max_position_embeddings=64), "short has 64 positions but .* 128 tokens"),
    ):
        with pytest.raises(UserError, match=said):
            check(reference)
