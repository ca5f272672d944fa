"""Training rows of several sources: unique and stable ids, counts for each source, one order for all."""

import json

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.data.mixtures import IDS_PER_SOURCE
from nemo_style_rlhf.data.prompts import load_training_prompts
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.paths import require_paths


def config(**data):
    return build(PromptDataConfig, OmegaConf.create(data))


def write(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def test_ids_are_unique_over_sources_and_keep_to_their_rows(tmp_path, tokenizer):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    mixture = [{"path": write(one, ["a", "toolong", "b"]), "weight": 3}, {"path": [write(two, ["c", "d"]), str(two)]}]
    training = load_training_prompts(config(mixture=mixture, max_prompt_length=3), tokenizer)
    ids = [0, 2, *(IDS_PER_SOURCE + row for row in range(4))]
    assert [(prompt.prompt_id, prompt.text) for prompt in training.rows] == list(zip(ids, "abcdcd"))
    assert training.sizes == [2, 4] and training.weights == [3, 1]
    first, second = map(str, training.reports)
    assert first.startswith(f"{one} (75.0% of the mixture): 2 rows kept, 1 dropped (1 longer than 3 tokens; ")
    assert second == f"{two}, {two} (25.0% of the mixture): 4 rows"
    taken = training.sampler(0).take(0, 64)
    assert sum(row < 2 for row in taken) == 48 and len(set(taken)) == 6


def test_weights_in_the_same_proportion_are_the_same_mixture(tmp_path, tokenizer):
    paths = [write(tmp_path / name, "abc") for name in ("one.jsonl", "two.jsonl")]
    identities = []
    for weights in ((3, 1), (6, 2), (1, 3)):
        mixture = [{"path": path, "weight": weight} for path, weight in zip(paths, weights)]
        identities.append(load_training_prompts(config(mixture=mixture), tokenizer).identity)
    assert identities[0] == identities[1] == {"data.mixture": [[3, 0.75], [3, 0.25]]} != identities[2]


def test_one_source_is_ordered_as_ever(tmp_path, tokenizer):
    path = write(tmp_path / "one.jsonl", "abc")
    training = load_training_prompts(config(train_path=path), tokenizer)
    assert training.identity == {"data.mixture": []} and str(training.reports[0]) == f"{path}: 3 rows"
    assert type(training.sampler(0)).__name__ == "PromptSampler"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, r"data\.train_path is not set"),
        (
            {"train_path": "a.jsonl", "mixture": [{"path": "b.jsonl"}]},
            r"data\.train_path and data\.mixture are both set",
        ),
        ({"mixture": [{"path": "a.jsonl", "weight": 0}]}, r"data\.mixture\[0\]\.weight=0\.0 is not possible"),
        ({"mixture": [{"path": "a.jsonl", "weight": "nan"}]}, r"data\.mixture\[0\]\.weight=nan is not possible"),
        ({"mixture": [{"weight": 1}]}, r"mixture\[0\]\.path is not set"),
        ({"mixture": [{"path": "a.jsonl", "share": 1}]}, "share"),
        ({"train_path": 3}, r"data\.train_path=3 is not possible: expected a file, a data set, or a list of them"),
        ({"train_path": []}, r"data\.train_path=\[\] is not possible"),
        ({"train_path": ["a.jsonl", None]}, r"data\.train_path=\['a\.jsonl', None\] is not possible"),
        ({"train_path": "a", "apply_chat_template": True, "prompt_template": "{prompt}"}, "takes a chat template"),
    ],
)
def test_impossible_sources_are_refused(data, sentence):
    with pytest.raises(UserError, match=sentence):
        config(**data)


def test_missing_files_of_lists_and_mixtures_are_named(tmp_path):
    there = write(tmp_path / "there.jsonl", ["a"])
    with pytest.raises(UserError, match=r"train_path=none\.jsonl: it does not exist"):
        require_paths(config(train_path=[there, "none.jsonl"]))
    with pytest.raises(UserError, match=r"mixture\[1\]\.path=none\.jsonl: it does not exist"):
        require_paths(config(mixture=[{"path": there}, {"path": "none.jsonl"}]))
