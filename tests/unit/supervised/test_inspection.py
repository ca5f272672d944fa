"""What is shown of a training sample is what training does with it."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_style_rlhf.data.examples import SFTExample
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.inspection import STAGES, InspectDataConfig, InspectedDataConfig
from nemo_style_rlhf.supervised.batches import collate_sft
from nemo_style_rlhf.supervised.inspection import Shown, TokenTexts, render, scored_token


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and few merges, so that characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize("prompt_length", [0, 1, 2, 4])
def test_the_learned_tokens_are_those_of_the_loss(prompt_length: int):
    """The loss at entry t is that of token t + 1."""
    row = SFTExample([5, 6, 7, 8, 9], prompt_length)
    mask = collate_sft([row], [row], 0).action_mask[0].bool().tolist()
    assert row.learned() == [False, *mask[:-1]]


def test_a_reward_model_is_read_before_the_end_of_text_where_that_is_its_pad_token():
    assert scored_token([5, 6, 7, 0], 0) == [False, False, True, False]
    assert scored_token([5, 6, 7, 0], 1) == [False, False, False, True]
    assert scored_token([5, 6, 7, 0], None) == [False, False, False, True]


def test_white_space_special_tokens_and_parts_of_characters_are_visible(tokenizer: PreTrainedTokenizerFast):
    ids = [*tokenizer("the cat\n\té</s>")["input_ids"]]
    shown = Shown("text", ids, SFTExample(ids, 1).learned())
    assert render(shown, TokenTexts(tokenizer)).plain == "the│⟦·cat│⏎\n│→\t│Ã│©│⟨</s>⟩⟧"


def test_a_special_token_and_its_name_are_told_apart(tokenizer: PreTrainedTokenizerFast):
    written = [tokenizer.convert_tokens_to_ids(character) for character in "</s>"]
    texts = TokenTexts(tokenizer)
    assert "".join(texts(token)[0] for token in written) == "</s>"
    assert texts(tokenizer.eos_token_id) == ("⟨</s>⟩", True)


def test_brackets_close_before_what_is_not_learned(tokenizer: PreTrainedTokenizerFast):
    ids = [tokenizer.convert_tokens_to_ids(character) for character in "abcd"]
    shown = Shown("text", ids, [True, False, True, True])
    assert render(shown, TokenTexts(tokenizer)).plain == "⟦a⟧│b│⟦c│d⟧"


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_reads_its_own_keys_and_refuses_the_others(stage: str):
    config = InspectDataConfig(stage=stage, data=InspectedDataConfig(train_path="x"))
    config.validate()
    assert type(config.stage_data) is STAGES[stage]
    foreign = {"sft": "chosen_key", "reward_model": "completion_key", "dpo": "margin_key", "kto": "response_key"}[stage]
    setattr(config.data, foreign, "column")
    with pytest.raises(UserError, match=rf"data\.{foreign} is set but stage={stage} does not read it: set stage to "):
        config.validate()
