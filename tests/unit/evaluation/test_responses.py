"""The responses of an earlier start are used for the same question alone, and whole."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.evaluation.responses import Responses
from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig

PROMPTS = [Prompt(number, [number, 9], f"p{number}", label=str(number), metadata={"n": number}) for number in range(3)]
SAMPLES = [
    Sample(prompt.prompt_id, "a: b/c", 0, 5, prompt.text, "r\u2028é\n", 3, "stop", token_ids=(*prompt.token_ids, 7))
    for prompt in PROMPTS
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Checkpoint("a: b/c", str(tmp_path / "model"))


def config(tmp_path: Path, **changes: object) -> EvaluationConfig:
    config = EvaluationConfig(checkpoints=["unused"])
    config.run.output_dir = str(tmp_path)
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        setattr(getattr(config, part) if part else config, key, value)
    return config


def test_they_come_back_with_what_their_prompts_hold_now(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Labels and metadata are for the scoring, of which nothing is kept."""
    assert Responses(config(tmp_path), checkpoint, PROMPTS).load() is None
    Responses(config(tmp_path), checkpoint, PROMPTS).store(SAMPLES)
    relabeled = [replace(prompt, label="new") for prompt in PROMPTS]
    where = config(tmp_path, generation__kv_cache_gib=7.0, reward__on_error="mask")
    assert Responses(where, checkpoint, relabeled).load() == [
        replace(sample, label="new", metadata={"n": number}) for number, sample in enumerate(SAMPLES)
    ]


@pytest.mark.parametrize(
    "change",
    [{"generation__temperature": 0.5}, {"run__seed": 3}, {"samples_per_prompt": 9}, {"model__dtype": "float32"}],
)
def test_other_settings_sample_anew(change: dict[str, object], tmp_path: Path, checkpoint: Checkpoint) -> None:
    Responses(config(tmp_path), checkpoint, PROMPTS).store(SAMPLES)
    assert Responses(config(tmp_path, **change), checkpoint, PROMPTS).load() is None


def test_another_model_and_other_prompts_sample_anew(tmp_path: Path, checkpoint: Checkpoint) -> None:
    Responses(config(tmp_path), checkpoint, PROMPTS).store(SAMPLES)
    assert Responses(config(tmp_path), checkpoint, PROMPTS[:2]).load() is None
    Path(checkpoint.path, "config.json").write_text("[]")
    assert Responses(config(tmp_path), checkpoint, PROMPTS).load() is None


@pytest.mark.parametrize("damage", ["", "{", '{"identity": 1}\n', "[[[[", "cut"])
def test_a_damaged_file_samples_anew_and_says_so(
    damage: str, tmp_path: Path, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    Responses(config(tmp_path), checkpoint, PROMPTS).store(SAMPLES)
    (file,) = (tmp_path / "responses").iterdir()
    text = file.read_text()
    file.write_text(text[:-20] if damage == "cut" else damage)
    assert Responses(config(tmp_path), checkpoint, PROMPTS).load() is None
    assert damage == '{"identity": 1}\n' or "is damaged" in caplog.text
