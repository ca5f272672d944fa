"""Words of a command line whose values hold characters of Hydra's grammar."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.overrides import is_override, override, readable

NAMES = [
    "a=b", "a,b", "[a", "{a}", "{a: 1}x", "it's", 'say"', "f(1)", "f(1).x", "a b", " a", "*", "?", "50%", "#1", "é", "日本", "-a",
    "~a", "a$b", "a${b}", "a\\", "a\\,b", "a;b", "1e3", "1_0", "a:b",
]  # fmt: skip


def read(word: str) -> object:
    value = OverridesParser.create().parse_override(word).value()
    return OmegaConf.to_container(OmegaConf.create({"key": value}), resolve=True)["key"]


@given(st.lists(st.sampled_from([*"a1/=,[]{}()'\"\\$~#%*?- é:", "${"]), max_size=12).map("".join))
def test_hydra_reads_from_an_override_the_text_that_it_was_made_from(text):
    assert read(override("key", text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_an_existing_path_is_taken_whatever_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    assert read(readable(f"key={name}", sweeps=False)) == name
    assert read(readable(f"key={tmp_path / name}", sweeps=False)) == str(tmp_path / name)


@pytest.mark.parametrize(
    "word", ["a.b=1e-3", "a=[b,c]", "a={b: 1}", "+a=null", "~a", "a/b=c", "a='b=c'", "a=1", "a=range(1,3)"]
)
def test_what_hydra_reads_stays_as_it_is(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "null").touch()
    assert is_override(word) and readable(word, sweeps=True) == word


def test_commas_separate_the_runs_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").touch()
    assert readable("key=a,b", sweeps=True) == "key=a,b"


@pytest.mark.parametrize("name", ["a=b", "a,b", "[a", "it's", "é", "~/a", "f(1)"])
def test_what_hydra_cannot_read_gets_a_sentence_with_the_words_for_a_shell(name):
    with pytest.raises(UserError) as refused:
        readable(f"data.train_path={name}", sweeps=False)
    beginning, _, rest = str(refused.value).partition(" cannot be read: if its value is one text, write ")
    assert beginning == f"data.train_path={name}"
    (word,) = shlex.split(rest.partition(";")[0])
    assert read(word) == name


@pytest.mark.parametrize("word", ["--config-dir=a", "/folder/a=b", "stage", "it's=3"])
def test_other_words_are_no_overrides(word):
    assert not is_override(word)
