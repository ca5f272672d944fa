"""The layouts of docs/data.md: what each row becomes, and how a faulty row among them is counted."""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_style_rlhf.data.layouts import prompt_layout
from nemo_style_rlhf.data.prompts import load_prompts
from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.data.supervised import load_pairs, load_sft, load_unpaired
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig, SFTDataConfig, UnpairedDataConfig
from tests.support.pages import table_rows
from tests.support.paths import ROOT

Rows = list[dict[str, Any]]
CHAT = (
    "{% for m in messages %}{{ {'system': 'S', 'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] }}{{ m.content }}|"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
"""Writes "Ux|Ay|" for a question x and an answer y."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def share(*turns: str) -> list[dict[str, str]]:
    """ShareGPT's turns from texts such as "human x"."""
    return [dict(zip(("from", "value"), turn.split(), strict=True)) for turn in turns]


@dataclass(frozen=True)
class Layout:
    """A layout, how it is read, and what becomes of it."""

    name: str
    """As in docs/data.md."""
    row: dict[str, Any]
    read: list[str]
    """The texts of the row's samples: "prompt" of a prompt, "prompt[learned]" of the others."""
    faulty: dict[str, Any]
    """The faulty row, which stands in place of another."""
    reason: str
    settings: dict[str, Any] = field(default_factory=dict)


def prompts(path: str, settings: dict[str, Any], tokenizer: Any) -> tuple[list[str], Any]:
    config = PromptDataConfig(train_path=path, **settings)
    validate(config, "data.")
    found, report = load_prompts(path, config, tokenizer)
    return [prompt.text for prompt in found], report


def learned(tokenizer: Any, token_ids: list[int], mask: list[bool]) -> str:
    """The text with brackets around what is learned."""
    text, before = "", False
    for token, now in zip([*token_ids, None], [*mask, False], strict=True):
        text += "" if now == before else "[" if now else "]"
        text += "" if token is None else tokenizer.decode([token])
        before = now
    return text


def sft(path: str, settings: dict[str, Any], tokenizer: Any) -> tuple[list[str], Any]:
    config = SFTDataConfig(train_path=path, append_eos=False, **settings)
    validate(config, "data.")
    found, report = load_sft(path, config, tokenizer)
    return [learned(tokenizer, row.token_ids, row.learned()) for row in found], report


def pairs(path: str, settings: dict[str, Any], tokenizer: Any) -> tuple[list[str], Any]:
    config = PreferenceDataConfig(train_path=path, append_eos=False, **settings)
    validate(config, "data.")
    found, report = load_pairs(path, config, tokenizer)

    def shown(ids: list[int], start: int) -> str:
        return learned(tokenizer, ids, [position >= start for position in range(len(ids))])

    return [shown(ids, pair.prompt_length) for pair in found for ids in (pair.chosen, pair.rejected)], report


def kto(path: str, settings: dict[str, Any], tokenizer: Any) -> tuple[list[str], Any]:
    config = UnpairedDataConfig(train_path=path, append_eos=False, **settings)
    validate(config, "data.")
    found, report = load_unpaired(path, config, tokenizer)
    return [f"{'+-'[not row.desirable]}{learned(tokenizer, row.token_ids, row.learned())}" for row in found], report


NULL, NOT_LIST = "whose {!r} is null", "whose {!r} is not a list of messages"
HH = "\n\nHuman: x\n\nAssistant:"
CHATTED = {"apply_chat_template": True}
MESSAGES = {"format": "messages"}
COLUMNS = {"role": ["user", "assistant"], "content": ["x", "y"]}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
IMAGE = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]

PROMPTS = [
    Layout("prompt", {"prompt": "x"}, ["x"], {"prompt": None}, NULL.format("prompt")),
    Layout(
        "prompt, chat template", {"prompt": "x"}, ["Ux|A"], {"prompt": 3},
        "whose 'prompt' holds int instead of a string", CHATTED,
    ),
    Layout(
        "prompt and system, chat template", {"prompt": "x", "system": "s"}, ["Ss|Ux|A"], {"prompt": " "}, "empty", CHATTED
    ),
    Layout("Alpaca", {"instruction": "x", "input": "z", "output": "y"}, ["x\n\nz"], {"instruction": None},
           NULL.format("instruction")),
    Layout("Alpaca without input", {"instruction": "x", "input": "", "output": "y"}, ["x"], {"input": ["z"]},
           "whose 'input' holds list instead of a string"),
    Layout("Alpaca, chat template", {"instruction": "x", "input": "z"}, ["Ux\n\nz|A"], {"instruction": " ", "input": ""},
           "empty", CHATTED),
    Layout("messages", {"messages": [user("x")]}, ["Ux|A"], {"messages": []}, NOT_LIST.format("messages"), MESSAGES),
    Layout("messages with an answer", {"messages": [user("x"), assistant("y")]}, ["Ux|A"],
           {"messages": [assistant("y")]}, "without a turn before the answer", MESSAGES),
    Layout("messages of parts", {"messages": PARTS}, ["Ux|A"], {"messages": IMAGE}, "with a turn that is not text", MESSAGES),
    Layout("messages as columns", {"messages": COLUMNS}, ["Ux|A"], {"messages": {**COLUMNS, "role": ["user"]}},
           "with unequal numbers of roles and contents", MESSAGES),
    Layout("ShareGPT", {"conversations": share("human x")}, ["Ux|A"], {"conversations": share("narrator x")},
           "with a turn from 'narrator'", MESSAGES),
    Layout("ShareGPT with an answer", {"conversations": share("system s", "human x", "gpt y", "human z", "gpt y")},
           ["Ss|Ux|Ay|Uz|A"], {"conversations": share("system s", "gpt y")}, "without a turn before the answer", MESSAGES),
    Layout("ShareGPT and system", {"conversations": share("human x", "function_call y", "observation z"), "system": "s"},
           ["Ss|Ux|Ay|Tz|A"], {"conversations": [{"from": "human"}]}, "with a turn that is not text", MESSAGES),
    Layout("ShareGPT, chat template", {"conversations": share("human x", "gpt y")}, ["Ux|A"], {"conversations": None},
           NULL.format("conversations"), CHATTED),
    Layout("prompt of messages", {"prompt": [user("x")]}, ["Ux|A"], {"prompt": [{"role": "bot", "content": "x"}]},
           "with the role 'bot' in the last turn", MESSAGES),
    Layout("prompt of messages with an answer, chat template", {"prompt": [user("x"), assistant("y")]}, ["Ux|A"],
           {"prompt": [{"speaker": "x"}]}, "with a turn without a role", CHATTED),
    Layout("HH transcript", {"chosen": HH + " y"}, [HH], {"chosen": "\n\nHuman: x"}, "without an assistant turn",
           {"format": "hh"}),
    Layout("HH transcript, chat template", {"chosen": HH + " y"}, ["Ux|A"], {"chosen": "\n\nAssistant: y"},
           "without a turn before the answer", {"format": "hh", **CHATTED}),
    Layout("HH transcript and system, chat template", {"chosen": HH + " y", "system": "s"}, ["Ss|Ux|A"],
           {"chosen": None}, NULL.format("chosen"), {"format": "hh", **CHATTED}),
]  # fmt: skip
SFT = [
    Layout("text", {"text": "xy"}, ["x[y]"], {"text": None}, NULL.format("text")),
    Layout("prompt and response", {"prompt": "x", "response": "y"}, ["x[y]"], {"response": None}, NULL.format("response")),
    Layout("prompt and completion", {"prompt": "x", "completion": "y"}, ["x[y]"], {"completion": " "},
           "with an empty response"),
    Layout("prompt and completion, chat template", {"prompt": "x", "completion": "y"}, ["Ux|A[y|]"], {"completion": ""},
           "with an empty response", CHATTED),
    Layout("prompt and completion of messages", {"prompt": [user("x"), assistant("z"), user("x")],
           "completion": [assistant("y")]}, ["Ux|Az|Ux|A[y|]"], {"completion": [user("y")]},
           "without an assistant's last turn"),
    Layout("Alpaca in SFT", {"instruction": "x", "input": "z", "output": "y"}, ["x\n\nz[y]"], {"output": None},
           NULL.format("output")),
    Layout("Alpaca in SFT, chat template", {"instruction": "x", "input": "z", "output": "y"}, ["Ux\n\nz|A[y|]"],
           {"input": 3}, "whose 'input' holds int instead of a string", CHATTED),
    Layout("messages in SFT", {"messages": [user("x"), assistant("y"), user("z"), assistant("y")]},
           ["Ux|A[y|]Uz|A[y|]"], {"messages": [user("x")]}, "without an assistant's last turn"),
    Layout("ShareGPT in SFT", {"conversations": share("human x", "gpt y")}, ["Ux|A[y|]"],
           {"conversations": share("human x", "gpt y", "human x")}, "without an assistant's last turn"),
    Layout("ShareGPT and system in SFT", {"conversations": share("human x", "gpt y"), "system": "s"}, ["Ss|Ux|A[y|]"],
           {"conversations": [{"from": "gpt", "value": None}]}, "with a turn that is not text"),
    Layout("ShareGPT after a greeting in SFT", {"conversations": share("gpt z", "human x", "gpt y")}, ["Az|Ux|A[y|]"],
           {"conversations": share("gpt y")}, "without a turn before the answer"),
]  # fmt: skip
PAIRS = [
    Layout("pair", {"prompt": "x", "chosen": "y", "rejected": "z"}, ["x[y]", "x[z]"], {"prompt": None},
           NULL.format("prompt")),
    Layout("pair, chat template", {"prompt": "x", "chosen": "y", "rejected": "z"}, ["Ux|A[y|]", "Ux|A[z|]"],
           {"rejected": "y"}, "with equal responses", CHATTED),
    Layout("pair of Alpaca's instruction", {"instruction": "x", "input": "w", "chosen": "y", "rejected": "z"},
           ["x\n\nw[y]", "x\n\nw[z]"], {"chosen": None}, NULL.format("chosen")),
    Layout("pair, implicit", {"chosen": "x x y", "rejected": "x x z"}, ["x x[ y]", "x x[ z]"],
           {"chosen": "y", "rejected": "z"}, "without a beginning that both texts share"),
    Layout("pair of messages", {"prompt": [user("x")], "chosen": [assistant("y")], "rejected": [assistant("z")]},
           ["Ux|A[y|]", "Ux|A[z|]"], {"rejected": [assistant("")]}, "with an empty response"),
    Layout("pair of messages, implicit", {"chosen": [user("x"), assistant("y")], "rejected": [user("x"), assistant("z")]},
           ["Ux|A[y|]", "Ux|A[z|]"], {"rejected": [user("w"), assistant("z")]}, "with differing prompts"),
    Layout("pair of messages that repeat their prompt", {"prompt": [assistant("w"), user("x")],
           "chosen": [assistant("w"), user("x"), assistant("y")], "rejected": [assistant("w"), user("x"), assistant("z")]},
           ["Aw|Ux|A[y|]", "Aw|Ux|A[z|]"], {"prompt": [assistant("v"), user("x")]},
           "whose 'chosen' does not go on with its 'prompt'"),
    Layout("pair of messages and a text", {"prompt": "x", "chosen": [assistant("y")], "rejected": [assistant("z")]},
           ["Ux|A[y|]", "Ux|A[z|]"], {"chosen": "y", "rejected": [assistant("z")]}, "with differing prompts"),
    Layout("pair of single turns after ShareGPT", {"conversations": share("human x"), "chosen": share("gpt y")[0],
           "rejected": share("gpt z")[0]}, ["Ux|A[y|]", "Ux|A[z|]"], {"conversations": share("who x")},
           "with a turn from 'who'"),
    Layout("pair of HH transcripts", {"chosen": HH + "y", "rejected": HH + "z"}, [HH + "[y]", HH + "[z]"],
           {"rejected": "\n\nHuman: w\n\nAssistant:z"}, "with differing prompts"),
    Layout("pair of HH transcripts, chat template", {"chosen": HH + " y", "rejected": HH + " z"}, ["Ux|A[y|]", "Ux|A[z|]"],
           {"rejected": "z"}, "without an assistant turn", CHATTED),
]  # fmt: skip
KTO = [
    Layout("judged completion", {"prompt": "x", "completion": "y", "label": True}, ["+x[y]"], {"label": None},
           NULL.format("label")),
    Layout("judged completion, 0 and 1", {"prompt": "x", "completion": "y", "label": 0}, ["-x[y]"], {"completion": None},
           NULL.format("completion")),
    Layout("judged completion, labels as texts", {"prompt": "x", "completion": "y", "label": "False"}, ["-x[y]"],
           {"prompt": None}, NULL.format("prompt")),
    Layout("judged completion, chat template", {"prompt": "x", "completion": "y", "label": 1}, ["+Ux|A[y|]"],
           {"completion": ""}, "with an empty response", CHATTED),
    Layout("judged messages", {"prompt": [user("x")], "completion": [assistant("y")], "label": 1.0}, ["+Ux|A[y|]"],
           {"completion": [user("y")]}, "whose 'completion' does not go on with its 'prompt'"),
    Layout("judged conversation", {"messages": [user("x"), assistant("y")], "label": "0"}, ["-Ux|A[y|]"],
           {"messages": [user("x")]}, "without an assistant's last turn"),
    Layout("judged conversation after a greeting", {"conversations": share("gpt z", "human x", "gpt y"), "label": True},
           ["+Az|Ux|A[y|]"], {"conversations": share("gpt y")}, "without a turn before the answer"),
    Layout("pair in KTO", {"prompt": "x", "chosen": "y", "rejected": "z"}, ["+x[y]", "-x[z]"], {"rejected": "y"},
           "with equal responses"),
]  # fmt: skip
Load = Callable[[str, dict[str, Any], Any], tuple[list[str], Any]]
LAYOUTS: list[tuple[Load, Layout]] = [
    (load, layout)
    for load, layouts in ((prompts, PROMPTS), (sft, SFT), (pairs, PAIRS), (kto, KTO))
    for layout in layouts
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {character: index for index, character in enumerate(string.printable)} | {
        "<unk>": len(string.printable)
    }
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>", chat_template=CHAT)


@pytest.mark.parametrize(("load", "layout"), LAYOUTS, ids=[layout.name for _, layout in LAYOUTS])
def test_a_layout_is_read_and_its_faulty_row_is_counted_by_reason(tmp_path, tokenizer, load, layout):
    path = tmp_path / "rows.jsonl"
    rows = [layout.row, {**layout.row, **layout.faulty}, layout.row]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read, report = load(str(path), layout.settings, tokenizer)
    assert read == layout.read * 2
    assert (report.kept, report.dropped) == (2, {layout.reason: 1})
    assert "line 2" in str(report)


@pytest.mark.parametrize(("load", "layout"), LAYOUTS, ids=[layout.name for _, layout in LAYOUTS])
def test_nothing_but_faulty_rows_is_refused_in_one_sentence(tmp_path, tokenizer, load, layout):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**layout.row, **layout.faulty}) + "\n")
    with pytest.raises(UserError) as raised:
        load(str(path), layout.settings, tokenizer)
    assert "\n" not in str(raised.value) and "rows.jsonl" in str(raised.value)


@pytest.mark.parametrize(("load", "layout"), LAYOUTS, ids=[layout.name for _, layout in LAYOUTS])
def test_parquet_which_fills_missing_values_with_nulls_reads_the_same(tmp_path, tokenizer, load, layout):
    import datasets

    path = str(tmp_path / "rows.parquet")
    filler = {"role": None, "content": None, "name": None, "tool_calls": None}
    rows = json.loads(json.dumps([layout.row]), object_hook=lambda each: {**filler, **each} if "role" in each else each)
    datasets.Dataset.from_list(rows).to_parquet(path)
    assert load(path, layout.settings, tokenizer)[0] == layout.read


@pytest.mark.parametrize(("load", "layout"), LAYOUTS, ids=[layout.name for _, layout in LAYOUTS])
def test_conversations_that_are_stored_as_json_text_read_the_same(tmp_path, tokenizer, load, layout):
    """As tables hold them whose turns have no common type. An answer's own column may hold JSON that is the answer."""
    answers = ("completion", "response", "output")
    packed = {
        name: json.dumps(value) if isinstance(value, list) and name not in answers else value
        for name, value in layout.row.items()
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(packed) + "\n")
    assert load(str(path), layout.settings, tokenizer)[0] == layout.read
    path.write_text(json.dumps({"prompt": "[x]", "completion": "y"}) + "\n")
    assert sft(str(path), {}, tokenizer)[0] == ["[x][y]"]


ANSWERED = [user("x"), assistant("y")]
TWICE = [
    (sft, {"prompt": ANSWERED, "completion": "z"}),
    (sft, {"prompt": ANSWERED, "completion": [assistant("z")]}),
    (pairs, {"prompt": ANSWERED, "chosen": "y", "rejected": "z"}),
    (pairs, {"prompt": ANSWERED, "chosen": [assistant("y")], "rejected": [assistant("z")]}),
    (kto, {"prompt": ANSWERED, "completion": "z", "label": True}),
    (kto, {"prompt": ANSWERED, "completion": [assistant("z")], "label": True}),
]


@pytest.mark.parametrize(("load", "row"), TWICE)
def test_a_prompt_that_ends_with_an_answer_is_not_learned_from(tmp_path, tokenizer, load, row):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, {**row, "prompt": ANSWERED[:1]})))
    read, report = load(str(path), {}, tokenizer)
    assert read and report.dropped == {"whose 'prompt' already ends with an answer": 1}


def test_a_null_as_the_rows_system_prompt_is_none(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "x", "about": about} for about in ("s", None, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read, report = prompts(str(path), {**CHATTED, "system_key": "about"}, tokenizer)
    assert read == ["Ss|Ux|A", "Ux|A"] and report.dropped == {"whose 'about' holds int instead of a string": 1}


def test_nulls_at_any_depth_which_parquet_fills_in_are_no_values(tmp_path, tokenizer):
    import datasets

    tokenizer.chat_template = "{{ tools | tojson }}{{ messages | tojson }}"
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "z"}]},
    ]
    row = {"messages": turns, "tools": [{"name": "f", "parameters": {"a": {"type": "int"}}}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    filled = json.loads(
        json.dumps(row).replace('"a"', '"b": null, "a"').replace('"type": "text"', '"image": null, "type": "text"')
    )
    datasets.Dataset.from_list([filled]).to_parquet(str(tmp_path / "rows.parquet"))
    (plain,), _ = prompts(str(tmp_path / "rows.jsonl"), MESSAGES, tokenizer)
    (from_parquet,), _ = prompts(str(tmp_path / "rows.parquet"), MESSAGES, tokenizer)
    assert '"content": null' in plain and "image" not in plain + from_parquet and '"b"' not in plain + from_parquet


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.floats()
    | st.sampled_from(["", " ", "x", HH, "[]", "user", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "type", "text"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize(("load", "layout"), LAYOUTS, ids=[layout.name for _, layout in LAYOUTS])
def test_whatever_a_column_holds_the_row_is_kept_or_counted(tmp_path, tokenizer, load, layout, data):
    """A label of another scale ends the run instead."""
    column = data.draw(st.sampled_from([*layout.row, "system", "tools"]))
    changed = {**layout.row, column: data.draw(VALUES)}
    if data.draw(st.booleans()):
        changed.pop(column)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (layout.row, changed, layout.row)))
    try:
        read, report = load(str(path), layout.settings, tokenizer)
    except UserError:
        if column != "label":
            raise
        return
    assert report.kept + report.dropped.total() == 3 and len(read) % report.kept == 0
    assert read[: len(layout.read)] == layout.read == read[-len(layout.read) :]


@pytest.mark.parametrize(("few", "most", "kept"), [("x x", HH, 2), (HH, "x x", 3)], ids=["transcripts", "texts"])
def test_most_rows_decide_how_pairs_without_a_prompt_are_read(tmp_path, tokenizer, few, most, kept):
    """A few others do not turn the rest into faulty rows; a transcript among texts is read as one."""
    path = tmp_path / "rows.jsonl"
    rows = [{"chosen": f"{text} y", "rejected": f"{text} z"} for text in (most, few, most)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, report = pairs(str(path), {}, tokenizer)
    assert (report.kept, report.dropped.total()) == (kept, 3 - kept)


def test_the_documented_layouts_are_those_tried_here():
    assert len(LAYOUTS) >= 30
    documented = [(name, row) for name, row, *_ in table_rows(ROOT / "docs" / "data.md", "layout")]
    assert documented == [(layout.name, f"`{json.dumps(layout.row)}`") for _, layout in LAYOUTS]


@pytest.mark.parametrize(
    "row, settings, layout",
    [
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, {}, ("text", "prompt")),
        ({"instruction": "x", "chosen": "y", "rejected": "z"}, {}, ("text", "instruction")),
        ({"q": "x", "chosen": "y", "rejected": "z"}, {"prompt_key": "q"}, ("text", "q")),
        ({"prompt": [user("x")], "chosen": "y", "rejected": "z"}, {}, ("messages", "prompt")),
        ({"prompt": json.dumps([user("x")]), "chosen": "y", "rejected": "z"}, {}, ("messages", "prompt")),
        ({"good": [user("x"), assistant("y")]}, {"chosen_key": "good"}, ("messages", "good")),
        ({"chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "z"}, {}, ("hh", "chosen")),
        ({"chosen": "x y", "rejected": "x z"}, {}, None),
        ({"prompt": "x", "completion": "y", "label": True}, {}, ("text", "prompt")),
        ({"messages": [user("x"), assistant("y")], "label": True}, {}, ("messages", "messages")),
    ],
    ids=str,
)
def test_the_prompts_of_a_stage_have_a_layout_of_their_own(row: dict[str, Any], settings: dict[str, str], layout: Any):
    config = UnpairedDataConfig(train_path="rows.jsonl", **settings)
    assert prompt_layout(Record(0, "line 1", row), config) == layout
