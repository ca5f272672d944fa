"""An episode's tokens: what was sampled stays as it was, what was observed is not learned, and a rewritten past begins a row."""

import pytest

from nemo_style_rlhf.agents.environment import Action
from nemo_style_rlhf.agents.episode import Episode
from nemo_style_rlhf.agents.rows import SampledSpan
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from tests.unit.agents.chat_templates import CHATML, FORGETFUL, encoder

QUESTION = [said("user", "What is a cat?")]


def act(episode: Episode, encoder: Encoder, text: str, *, version: int = 3, truncated: bool = False) -> tuple[int, ...]:
    """Record an action whose tokens no tokenizer would choose for its text: one for each byte or character."""
    ids = [token for letter in text for token in encoder.rendered(letter)]
    logprobs = tuple(-0.5 - number for number in range(len(ids)))
    episode.record(Action(text, said("assistant", text), tuple(ids), logprobs, truncated), version)
    return tuple(ids)


def begun(encoder: Encoder, **settings) -> Episode:
    ids = encoder.rendered(encoder.chat(QUESTION, add_generation_prompt=True))
    return Episode(encoder, ids, QUESTION, **settings)


def test_sampled_tokens_stay_and_observed_ones_are_not_learned():
    chatml = encoder(CHATML)
    episode = begun(chatml)
    prompt = tuple(episode.tokens)
    first = act(episode, chatml, "An animal.")
    assert first != tuple(chatml.rendered("An animal."))
    episode.read([said("user", "Go on.")])
    middle = tuple(episode.tokens)[len(prompt + first) :]
    second = act(episode, chatml, "It purrs.", version=4, truncated=True)
    episode.read(" unread")  # after the last answer nothing is kept

    (row,) = episode.rows()
    assert row.tokens == prompt + first + middle + second
    assert [token for token, learned in zip(row.tokens, row.mask) if learned] == [*first, *second]
    ends = len(prompt + first), len(prompt + first + middle)
    assert row.turns == (SampledSpan(len(prompt), ends[0], "stop"), SampledSpan(ends[1], len(row.tokens), "length"))
    assert row.versions == (-1,) * len(prompt) + (3,) * len(first) + (-1,) * len(middle) + (4,) * len(second)
    assert [logprob for logprob, learned in zip(row.logprobs, row.mask) if not learned] == [0.0] * len(prompt + middle)
    assert row.logprobs[len(prompt)] == row.logprobs[ends[1]] == -0.5
    text = chatml.tokenizer.decode(row.tokens)
    whole = [*QUESTION, said("assistant", "An animal."), said("user", "Go on.")]
    assert text == chatml.chat(whole, add_generation_prompt=True) + "It purrs."
    assert (episode.turns, episode.sampled_tokens) == (2, len(first + second))


@pytest.mark.parametrize("by_template", [False, True])
def test_a_template_that_rewrites_begins_a_row_only_if_that_is_asked_for(by_template):
    forgetful = encoder(FORGETFUL)
    episode = begun(forgetful, by_template=by_template)
    first = act(episode, forgetful, "Hm.</think>A cat.")
    episode.reward(0.5)
    episode.read([said("user", "Sure?")])
    second = act(episode, forgetful, "Yes.")
    episode.reward(1.0)
    rows = episode.rows()
    learned = [tuple(token for token, own in zip(row.tokens, row.mask) if own) for row in rows]
    assert learned == ([first, second] if by_template else [first + second])
    assert [[turn.reward for turn in row.turns] for row in rows] == ([[0.5], [1.0]] if by_template else [[0.5, 1.0]])
    assert episode.total_reward == 1.5
    whole = [*QUESTION, said("assistant", "Hm.</think>A cat."), said("user", "Sure?")]
    if by_template:
        prompt = forgetful.rendered(forgetful.chat(whole, add_generation_prompt=True))
        assert rows[1].tokens == (*prompt, *second) and "Hm." not in forgetful.tokenizer.decode(rows[1].tokens)
    else:
        assert "Hm.</think>" in forgetful.tokenizer.decode(rows[0].tokens)


def test_following_a_template_that_appends_keeps_one_row():
    chatml = encoder(CHATML)
    episode = begun(chatml, by_template=True)
    # Only tokens that the tokenizer chooses itself come back from a rendering.
    text = "A cat."
    ids = tuple(chatml.rendered(text))
    episode.record(Action(text, said("assistant", text), ids, (-1.0,) * len(ids)), 0)
    episode.read([said("user", "Sure?")])
    act(episode, chatml, "Yes.")
    assert len(episode.rows()) == 1


@pytest.mark.parametrize(
    "observed, began_with",
    [
        ("Guess:", "Guess:"),
        ([said("user", "Guess!")], "<|im_start|>user\nGuess!<|im_end|>\n<|im_start|>assistant\n"),
        ([5, 6, 7], None),
    ],
)
def test_an_environment_may_begin_with_another_prompt(observed, began_with):
    chatml = encoder(CHATML)
    episode = begun(chatml)
    episode.begin(())
    assert episode.began_with is None and episode.tokens == begun(chatml).tokens
    episode.begin(observed)
    assert episode.began_with == (chatml.tokenizer.decode([5, 6, 7]) if began_with is None else began_with)
    expected = {str: chatml.prompt, list: chatml.rendered}[type(observed)](episode.began_with)
    assert episode.tokens == ([5, 6, 7] if began_with is None else expected)


def test_a_reward_before_the_first_action_is_refused():
    episode = begun(encoder(CHATML))
    episode.reward(0.0)
    with pytest.raises(UserError, match="reset gave a reward of 1, before there was an action: give it to a step"):
        episode.reward(1.0)


def test_an_observation_that_the_template_cannot_render_is_one_sentence():
    chatml = encoder(CHATML)
    for by_template in (False, True):
        episode = begun(chatml, by_template=by_template)
        act(episode, chatml, "A cat.")
        with pytest.raises(UserError, match="cannot render an observation"):
            episode.read([{"content": "without a role"}])


def test_an_episode_without_an_answer_has_its_prompt_alone():
    episode = begun(encoder(CHATML))
    (row,) = episode.rows()
    assert row.turns == () and not any(row.mask) and list(row.tokens) == episode.tokens
