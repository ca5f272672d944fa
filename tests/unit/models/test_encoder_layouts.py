"""Encoders as reward models: their rewards are those of a plain computation with transformers."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.scalar import PooledModel, max_positions
from nemo_style_rlhf.models.scalar_loading import load_critic, load_reward_model
from tests.unit.models.test_reward_layouts import config, write

ENCODER = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
ENCODERS: dict[str, PreTrainedConfig] = {
    "deberta_v2": DebertaV2Config(**ENCODER, type_vocab_size=0, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "bert": BertConfig(**ENCODER),
    "roberta": RobertaConfig(**ENCODER, type_vocab_size=1),
    "modernbert": ModernBertConfig(**ENCODER, cls_token_id=60, sep_token_id=61, bos_token_id=60, eos_token_id=61),
}


def save_pair_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """[CLS] prompt [SEP] response [SEP], as BERT's."""
    words = ["[UNK]", "[PAD]", *(f"w{index}" for index in range(2, 60)), "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 60), ("[SEP]", 61)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    fast.save_pretrained(path)
    return fast


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_read_prompt_and_response_as_a_pair(tmp_path: Path, name: str, labels: int) -> None:
    hf_config = ENCODERS[name]
    hf_config.num_labels = labels
    path = write(tmp_path, AutoModelForSequenceClassification, hf_config)
    tokenizer = save_pair_tokenizer(path)
    texts = [("w11 w2 w3", "w4 w5"), ("w6", "w7")]
    mix = [1.0] if labels == 1 else [-0.5, 2.0]
    model = load_reward_model(config(path), label_weights=None if labels == 1 else mix)
    assert isinstance(model, PooledModel)
    hf = AutoModelForSequenceClassification.from_pretrained(path).eval()
    text = RewardText(str(path), load_tokenizer(str(path)), append_eos=None, as_pair=True)
    rows = [torch.tensor(text.token_ids(*pair)) for pair in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    with torch.no_grad():
        together = model.rewards(ids, (ids != 1).long())
        for row, (prompt, response) in enumerate(texts):
            encoded = tokenizer(prompt, response, return_tensors="pt")
            if name != "bert":
                encoded.pop("token_type_ids", None)
            expected = hf(**encoded).logits[0] @ torch.tensor(mix)
            torch.testing.assert_close(together[row], expected, atol=1e-5, rtol=0)


def test_the_longest_sequence_of_an_encoder(tmp_path: Path) -> None:
    """RoBERTa numbers positions from its pad token's id on, here 1: with a table of 64, 62 tokens are its longest sequence."""
    for name, longest in (("roberta", 62), ("bert", 64)):
        path = write(tmp_path / name, AutoModelForSequenceClassification, ENCODERS[name])
        hf = AutoModelForSequenceClassification.from_pretrained(path)
        assert max_positions(hf) == longest
        hf(input_ids=torch.full((1, longest), 5))
        with pytest.raises((IndexError, RuntimeError)):
            hf(input_ids=torch.full((1, longest + 1), 5))


def test_no_critic_starts_from_an_encoder(tmp_path: Path) -> None:
    hf_config = ENCODERS["bert"]
    hf_config.num_labels = 1
    path = write(tmp_path, AutoModelForSequenceClassification, hf_config)
    with pytest.raises(UserError, match="BertForSequenceClassification has no `score` head over every token"):
        load_critic(config(path), seed=0)
