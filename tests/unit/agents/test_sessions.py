"""The tree of a session: sampled tokens stay as they are, each is trained in one row, and the order of calls changes nothing."""

import json
import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nemo_style_rlhf.agents.environment import Action
from nemo_style_rlhf.agents.events import Called
from nemo_style_rlhf.agents.sessions import Row, SampledSpan, Session, request_seed
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from tests.unit.agents.chat_templates import CHATML, MISTRAL, encoder

READER = encoder(CHATML)
(END,) = READER.rendered("<|im_end|>")
CALLING = """{%- if tools -%}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls -%}
{{- '<tool_call>' + call.function.name + call.function.arguments.items() | list | string + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""It reads arguments as an object alone."""
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def called(prompt, number=0, *, tools=None, **sampling) -> Called:
    return Called(episode=7, attempt=1, call=number, prompt=prompt, tools=tools, sampling=sampling or None)


def answered(text: str, *, ids: list[int] | None = None, truncated: bool = False, **fields) -> Action:
    """An answer with tokens of its own, whose log-probabilities tell them apart."""
    tokens = (*READER.rendered(text), *(() if truncated else (END,))) if ids is None else tuple(ids)
    logprobs = tuple(-(token % 7) / 8 - 0.125 for token in tokens)
    return Action(text, {**said("assistant", text), **fields}, tokens, logprobs, truncated)


def play(session: Session, call: Called, action: Action, version: int = 3, reader=READER) -> list[int]:
    ids = session.prompt_for(call, reader)
    session.record(call, ids, action, version)
    return ids


def text_of(tokens) -> str:
    return str(READER.tokenizer.decode(list(tokens), skip_special_tokens=False))


def learned(row: Row) -> str:
    return text_of(token for token, trained in zip(row.tokens, row.mask, strict=True) if trained)


QUESTION, AGAIN = said("user", "What is a cat?"), said("user", "And a mat?")


def test_a_conversation_that_grows_is_one_row_of_sampled_tokens():
    """The first answer is tokenized unlike its text would be: its tokens stay, and everything else equals the rendering."""
    session = Session(1)
    odd = [READER.rendered(letter)[0] for letter in "A question"]
    assert odd != READER.rendered("A question")
    first = play(session, called([QUESTION]), answered("A question", ids=[*odd, END]))
    assert first == READER.rendered(READER.chat([QUESTION], add_generation_prompt=True))
    so_far = [QUESTION, said("assistant", "A question"), AGAIN]
    second = play(session, called(so_far, 1), answered("A rug", truncated=True), version=4)
    assert second[: len(first) + len(odd) + 1] == [*first, *odd, END]
    assert text_of(second) == READER.chat(so_far, add_generation_prompt=True)
    (row,) = session.rows()
    rug = READER.rendered("A rug")
    starts = len(first), len(second)
    assert row.tokens == (*second, *rug)
    assert row.turns == (
        SampledSpan(starts[0], starts[0] + len(odd) + 1, "stop"),
        SampledSpan(starts[1], starts[1] + len(rug), "length"),
    )
    sampled = {*range(starts[0], row.turns[0].end), *range(starts[1], row.turns[1].end)}
    assert [position for position, trained in enumerate(row.mask) if trained] == sorted(sampled)
    assert row.versions == tuple(
        -1 if place not in sampled else 3 if place < starts[1] else 4 for place in range(len(row.tokens))
    )
    assert row.logprobs[starts[0] : row.turns[0].end] == answered("", ids=[*odd, END]).logprobs
    assert {row.logprobs[place] for place in range(len(row.tokens)) if place not in sampled} == {0.0}


def test_branches_are_rows_and_shared_tokens_are_learned_once():
    session = Session(1)
    play(session, called([QUESTION]), answered("A thing"))
    so_far = [QUESTION, said("assistant", "A thing")]
    for number, word in enumerate(["one", "two", "three"]):
        play(session, called([*so_far, said("user", word)], number + 1), answered(f"answer {word}"))
    rows = session.rows()
    assert len(rows) == 3 and [row.tokens for row in rows] == sorted(row.tokens for row in rows)
    assert sum("A thing" in learned(row) for row in rows) == 1 and "A thing" in learned(rows[0])
    assert all("A thing" in text_of(row.tokens) for row in rows)
    assert sorted(learned(row).removeprefix("A thing<|im_end|>") for row in rows) == [
        f"answer {word}<|im_end|>" for word in ["one", "three", "two"]
    ]
    assert [len(row.turns) for row in rows] == [2, 1, 1]
    assert all(sum(turn.end - turn.start for turn in row.turns) == sum(row.mask) for row in rows)


def drafts(*last: str, order: Sequence[int] = (0, 1, 2)) -> Session:
    """Three drafts side by side, and a call after each of ``last``, which may quote them."""
    session = Session(1)
    for number in order:
        play(session, called([said("user", f"Draft {number}")], number), answered(f"draft {number}"))
    for number, prompt in enumerate(last, start=3):
        play(session, called([said("user", prompt)], number), answered(f"answer {number}"))
    return session


def test_the_answer_that_has_read_all_others_is_the_samples() -> None:
    """Wherever its tokens sort, and whenever its call came."""
    for order in ((0, 1, 2), (2, 0, 1)):
        session = drafts("Which of draft 0, draft 1 and draft 2?", order=order)
        assert session.has_answer() and learned(session.rows()[-1]) == "answer 3<|im_end|>"
        assert sorted(map(learned, session.rows())) == sorted(
            ["answer 3<|im_end|>", *(f"draft {number}<|im_end|>" for number in range(3))]
        )


def test_nothing_tells_which_of_several_answers_is_the_samples_but_the_program() -> None:
    for session in (drafts(), drafts("Which of draft 0 and draft 1?"), drafts("draft 0 draft 1 draft 2", "go on")):
        assert not session.has_answer()
        assert session.has_answer(1) and learned(session.rows(1)[-1]) == "draft 1<|im_end|>"
        assert sorted(session.rows(1), key=lambda row: row.tokens) == session.rows()
    assert Session(1).has_answer()


def test_a_named_answer_may_be_one_that_a_later_call_continued() -> None:
    """It is a row of its own, and each token is learned once."""
    session = Session(1)
    play(session, called([QUESTION], 0), answered("A thing"))
    play(session, called([QUESTION, said("assistant", "A thing"), AGAIN], 1), answered("A rug"))
    rest, named = session.rows(0)
    assert (learned(rest), learned(named)) == ("A rug<|im_end|>", "A thing<|im_end|>")
    assert rest.tokens[: len(named.tokens)] == named.tokens
    (both,) = session.rows(1)
    assert learned(both) == "A thing<|im_end|>A rug<|im_end|>" and session.rows() == [both]


@pytest.mark.parametrize(
    "history",
    [
        [QUESTION, said("assistant", "A thing."), AGAIN],
        [QUESTION, said("assistant", "a thing"), AGAIN],
        [said("user", "What is a rat?"), said("assistant", "A thing"), AGAIN],
        [said("system", "Be brief."), QUESTION, said("assistant", "A thing"), AGAIN],
    ],
    ids=["point", "case", "question", "system"],
)  # fmt: skip
def test_an_edited_history_is_a_new_branch(history):
    session = Session(1)
    play(session, called([QUESTION]), answered("A thing"))
    ids = play(session, called(history, 1), answered("A rug"))
    assert ids == READER.rendered(READER.chat(history, add_generation_prompt=True))
    assert sorted(map(learned, session.rows())) == ["A rug<|im_end|>", "A thing<|im_end|>"]


def test_other_tools_are_another_beginning():
    reader, session = encoder(CALLING), Session(1)
    play(session, called([QUESTION]), answered("A thing", ids=[5, 6, END]), reader=reader)
    history = [QUESTION, said("assistant", "A thing"), AGAIN]
    ids = session.prompt_for(called(history, 1, tools=TOOLS), reader)
    assert ids == reader.rendered(reader.chat(history, add_generation_prompt=True, tools=TOOLS))


def test_an_answer_with_a_call_that_the_policy_did_not_make_is_another():
    reader, session = encoder(CALLING), Session(1)
    play(session, called([QUESTION]), answered("A thing", ids=[5, 6, END]), reader=reader)
    history = [QUESTION, {**said("assistant", "A thing"), "tool_calls": [CALL]}, AGAIN]
    ids = session.prompt_for(called(history, 1), reader)
    assert ids == reader.rendered(reader.chat(history, add_generation_prompt=True))


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "cat", "times": None}},
}
TEXT_CALL = {**CALL, "function": {"name": "look_up", "arguments": '{ "times": null,"word":"cat" }'}}


@pytest.mark.parametrize(
    "sent",
    [
        {"content": "", "tool_calls": [CALL]},
        {"content": None, "tool_calls": [TEXT_CALL]},
        {"tool_calls": [TEXT_CALL]},
        {"content": [], "tool_calls": [{**TEXT_CALL, "id": "other", "index": 0}]},
        {"content": [{"type": "text", "text": ""}], "tool_calls": [CALL], "refusal": None, "audio": None, "function_call": None},
        {"content": "", "tool_calls": [CALL], "reasoning_content": "the client's own", "annotations": []},
    ],
)  # fmt: skip
def test_an_answer_that_a_client_has_normalized_is_the_same_answer(sent):
    reader, session = encoder(CALLING), Session(1)
    (end,) = reader.rendered("<|im_end|>")
    action = answered("", ids=[5, 6, end], tool_calls=[CALL], reasoning_content="why")
    first = play(session, called([QUESTION], tools=TOOLS), action, reader=reader)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "an animal"}
    call = called([QUESTION, {"role": "assistant", **sent}, result], 1, tools=TOOLS)
    ids = session.prompt_for(call, reader)
    assert ids[: len(first) + 3] == [*first, 5, 6, end]
    rest = reader.tokenizer.decode(ids[len(first) + 3 :], skip_special_tokens=False)
    assert rest == "\n<|im_start|>tool\nan animal<|im_end|>\n<|im_start|>assistant\n"


def test_a_new_branch_has_its_arguments_as_the_template_reads_them():
    reader = encoder(CALLING)
    history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]}, AGAIN]
    ids = Session(1).prompt_for(called(history, tools=TOOLS), reader)
    assert "look_up[('times', None), ('word', 'cat')]" in reader.tokenizer.decode(ids)


def test_parts_of_text_are_the_text():
    session = Session(1)
    action = answered("A thing")
    first = play(session, called([QUESTION]), action)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a cat?"}]
    history = [{"role": "user", "content": parts, "name": None}, said("assistant", "A thing"), AGAIN]
    assert session.prompt_for(called(history, 1), READER)[: len(first)] == first


def test_what_the_template_refuses_is_a_sentence():
    session = Session(1)
    with pytest.raises(UserError, match="the chat template cannot render the conversation: it is refused by"):
        session.prompt_for(called([QUESTION, AGAIN]), encoder(MISTRAL))
    with pytest.raises(UserError, match="ends with the assistant's message: add one"):
        session.prompt_for(called([QUESTION, said("assistant", "A")]), READER)
    with pytest.raises(UserError, match="the tokenizer has none: set"):
        session.prompt_for(called([QUESTION]), encoder(None))


def test_an_answer_without_tokens_is_no_answer():
    with pytest.raises(ValueError, match="an answer of 0 tokens has 0"):
        Session(1).record(called("A"), [1], answered("", ids=[]), 3)


def test_texts_and_token_ids():
    session = Session(1)
    first = play(session, called("Once upon"), answered(" a time", truncated=True))
    assert first == READER.prompt("Once upon")
    second = play(session, called("Once upon a time, there", 1), answered(" was"))
    assert text_of(second) == "Once upon a time, there" and second[: len(first)] == first
    other = play(session, called("Once more", 2), answered("!"))
    assert other == READER.prompt("Once more")
    third = play(session, called([*second, *answered(" was").token_ids, 9, 8], 3), answered(" I"))
    assert third[-2:] == [9, 8]
    assert sorted(map(learned, session.rows())) == [" a time was<|im_end|> I<|im_end|>", "!<|im_end|>"]


def test_equal_answers_to_equal_calls_are_two_samples():
    """Each was drawn by itself, so that each is trained; a call that goes on from them goes on from one."""
    session = Session(1)
    for number in range(2):
        play(session, called([QUESTION], number), answered("A thing"))
    play(session, called([QUESTION, said("assistant", "A thing"), AGAIN], 2), answered("A rug"))
    assert sorted(map(learned, session.rows())) == ["A thing<|im_end|>", "A thing<|im_end|>A rug<|im_end|>"]


def test_a_session_without_calls_has_no_rows():
    assert Session(1).rows() == []


def test_seeds_follow_from_what_was_asked_and_how_often():
    one, other = Session(5), Session(5)
    ids = one.prompt_for(called([QUESTION]), READER)
    seeds = [one.seed_for(called([QUESTION], number), ids) for number in range(3)]
    assert len({*seeds}) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    more = one.prompt_for(called([AGAIN]), READER)
    again = [other.seed_for(call, tokens) for call, tokens in ((called([AGAIN]), more), (called([QUESTION], 9), ids))]
    assert again == [one.seed_for(called([AGAIN], 3), more), seeds[0]]
    assert Session(6).seed_for(called([QUESTION]), ids) != seeds[0]


def test_calls_that_differ_in_a_limit_alone_do_not_swap_their_seeds():
    """Counted together, the first to come would get the seed of the first: an answer would depend on the order."""
    short, long = called([QUESTION], max_length=4), called([QUESTION], max_length=9)
    ids, found = [1, 2, 3], []
    for order in ((short, long), (long, short)):
        session = Session(5)
        seeds = {call.sampling["max_length"]: session.seed_for(call, ids) for call in order}
        found.append(seeds)
    assert found[0] == found[1] and len({*found[0].values()}) == 2


def test_the_seed_of_a_request_has_one_value_for_ever():
    """`printf '[5, [1, 2], 0, ""]' | sha256sum` begins with fbf9974d; 31 bits of it are left."""
    assert request_seed(5, [1, 2], 0) == 0xFBF9974D >> 1


def episode(order: random.Random) -> tuple[list[Row], list[str]]:
    """Rounds of calls side by side, which end in any order; the answers are a function of prompt and seed alone."""
    session = Session(11)
    histories = [[said("user", f"q{number % 3}")] for number in range(5)]
    heard = []
    for _ in range(3):
        order.shuffle(histories)
        running = []
        for history in histories:
            call = called([dict(message) for message in history])
            ids = session.prompt_for(call, READER)
            draw = random.Random(f"{session.seed_for(call, ids)} {ids}")
            running.append((history, call, ids, answered(draw.choice(["yes", "no", "a cat", "a mat"]))))
        order.shuffle(running)
        for history, call, ids, action in running:
            session.record(call, ids, action, 3)
            history += [action.message, said("user", f"and {action.text}?")]
            heard.append(json.dumps(history))
    return session.rows(), sorted(heard)


ALONE = episode(random.Random(0))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_order_of_calls_and_answers_changes_nothing(seed):
    assert episode(random.Random(seed)) == ALONE


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 3), min_size=1, max_size=3)), max_size=12), st.data()
)
def test_every_answer_is_learned_in_exactly_one_row(calls, data):
    """Against a slow count: as many tokens are trained as were sampled, in rows that hold no other row's leaf twice."""
    session, known = Session(1), [[1]]
    for number, (whom, completion) in enumerate(calls):
        before = known[whom % len(known)]
        call = called(before, number)
        session.record(call, before, answered("", ids=completion), 3)
        known.append([*before, *completion, 9])
    rows = session.rows()
    assert sum(sum(row.mask) for row in rows) == sum(len(completion) for _, completion in calls)
    shuffled = data.draw(st.permutations(range(len(calls))))
    other = Session(1)
    for number in shuffled:
        _, completion = calls[number]
        parent = known[calls[number][0] % (number + 1)]
        other.record(called(parent, number), parent, answered("", ids=completion), 3)
    assert other.rows() == rows
