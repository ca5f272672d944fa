"""Every start of a run is kept, and what it changes is said."""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nemo_style_rlhf.checkpoint import starts
from nemo_style_rlhf.checkpoint.files import SAMPLE_BYTES, SAMPLES
from nemo_style_rlhf.checkpoint.starts import (
    differences,
    is_done,
    log_differences,
    record_end,
    record_start,
    require_reachable,
    require_same,
    settle_today,
)
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.common import ModelConfig, TrainerRunConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.data import PromptTemplateConfig
from nemo_style_rlhf.schema.supervised import SFTConfig, SFTDataConfig, SupervisedEngineConfig


def configuration(folder: Path, *, lr: float = 1e-6, **data: str) -> SFTConfig:
    engine = SupervisedEngineConfig()
    engine.optim.lr = lr
    return SFTConfig(run=TrainerRunConfig(output_dir=str(folder)), engine=engine, data=SFTDataConfig(**data))


def kept(folder: Path) -> dict[str, float]:
    """File to learning rate."""
    return {
        path.name: yaml.safe_load(path.read_text())["engine"]["optim"]["lr"] for path in (folder / "configs").iterdir()
    }


def test_one_file_for_each_configuration_and_the_newest_apart(tmp_path: Path) -> None:
    record_start(tmp_path, configuration(tmp_path), after="step_000000")
    record_start(tmp_path, configuration(tmp_path), after="step_000002")  # nothing new
    assert kept(tmp_path) == {"001_step_000000.yaml": 1e-6}
    record_start(tmp_path, configuration(tmp_path, lr=2e-6), after="step_000004")
    record_start(tmp_path, configuration(tmp_path), after="step_000004")
    assert kept(tmp_path) == {
        "001_step_000000.yaml": 1e-6, "002_step_000004.yaml": 2e-6, "003_step_000004.yaml": 1e-6,
    }  # fmt: skip
    assert (tmp_path / "config.yaml").read_text() == (tmp_path / "configs/003_step_000004.yaml").read_text()


def test_a_requeued_job_on_other_nodes_and_ports_changes_nothing(tmp_path: Path) -> None:
    first, second = PPOActorConfig(), PPOActorConfig()
    for config in (first, second):
        config.run.output_dir = str(tmp_path)
    second.remote_critic_rm.host, second.remote_critic_rm.port, second.run.resume = "n2", 7002, "must"
    record_start(tmp_path, first, after="step_000000")
    assert differences(tmp_path, second) == []
    record_end(tmp_path, [])
    assert is_done(second, longer="algorithm.max_steps")


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused() -> None:
    require_reachable(4, 4, "algorithm.max_steps", "outputs/run")
    sentence = (
        "^outputs/run stands at step 4 but the run now ends after 2: raise algorithm.max_steps, or choose another"
    )
    with pytest.raises(UserError, match=sentence):
        require_reachable(4, 2, "algorithm.max_steps", "outputs/run")


def test_each_key_that_changed_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where a template holds what OmegaConf would take for an interpolation, or is long."""
    before = configuration(tmp_path, chat_template="cost: ${{ price }}")
    assert differences(tmp_path, before) is None
    log_differences(tmp_path, before)
    record_start(tmp_path, before, after="step_000000")
    assert differences(tmp_path, before) == []
    log_differences(tmp_path, before)
    assert not caplog.records
    now = configuration(tmp_path, lr=2e-5, chat_template="{{ x }}" * 20)
    now.model.lora.target_modules = ["q_proj"]
    assert sorted(differences(tmp_path, now) or []) == [
        'data.chat_template: "cost: ${{ price }}" -> "' + ("{{ x }}" * 20)[:79] + "... (sha256 56604c2eee5e)",
        "engine.optim.lr: 1e-06 -> 2e-05",
        'model.lora.target_modules: null -> ["q_proj"]',
    ]
    with caplog.at_level(logging.WARNING):
        log_differences(tmp_path, now)
    assert len(caplog.records) == 4 and "  engine.optim.lr: 1e-06 -> 2e-05" in caplog.text


def test_keys_of_one_side_alone_are_lines_too(tmp_path: Path) -> None:
    """As after an update, and in mappings that a user fills."""
    record_start(tmp_path, PromptTemplateConfig(), after="step_000000")
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("prompt_template", "template_of_prompts"))
    assert differences(tmp_path, PromptTemplateConfig("{prompt}")) == [
        'prompt_template: not there -> "{prompt}"',
        "template_of_prompts: null -> not there",
    ]


def test_a_damaged_file_is_named_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text("a: [1")
    log_differences(tmp_path, configuration(tmp_path))
    assert "config.yaml is damaged" in caplog.text
    record_start(tmp_path, configuration(tmp_path), after="step_000000")
    assert differences(tmp_path, configuration(tmp_path)) == []


def test_what_may_not_change_is_one_sentence(tmp_path: Path) -> None:
    require_same({"run.seed": 1}, {"run.seed": 1, "data.shuffle": True}, "x")  # an earlier version noted less
    with pytest.raises(
        UserError, match=r"^x is of a run with run\.seed 1, this one has 2: resume it as it was, or choose"
    ):
        require_same({"run.seed": 1}, {"run.seed": 2}, "x")


def test_a_run_is_done_while_its_exports_are_whole_and_nothing_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, export = configuration(tmp_path / "run"), tmp_path / "elsewhere"
    (export / "folder").mkdir(parents=True)
    weights = export / "folder" / "weights"
    weights.write_bytes(b"123")

    def done(config: SFTConfig) -> bool:
        return is_done(config, longer="trainer.max_steps")

    record_start(tmp_path / "run", config, after="step_000000")
    assert not done(config)
    record_end(tmp_path / "run", [export])
    assert done(config) and not done(configuration(tmp_path / "run", lr=1.0))
    assert "done: this run has ended and exported" in (said := capsys.readouterr().out)
    assert str(export) in said and "to train on raise trainer.max_steps" in said and said.count("\n") == 1
    weights.write_bytes(b"124")
    assert not done(config)
    weights.unlink()
    assert not done(config)
    weights.write_bytes(b"123")
    assert done(config)
    assert not done(replace(config, run=replace(config.run, resume="never")))
    record_start(tmp_path / "run", config, after="step_000009")  # it goes on, for whatever reason
    assert not done(config)


def test_large_exports_are_sampled_when_a_run_ends_and_at_each_start(tmp_path: Path) -> None:
    config, export = configuration(tmp_path / "run"), tmp_path / "export"
    export.mkdir()
    weights, size = export / "model.safetensors", 100 * SAMPLES * SAMPLE_BYTES
    with weights.open("wb") as file:
        file.truncate(size)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    record_start(tmp_path / "run", config, after="step_000000")
    record_end(tmp_path / "run", [export])
    assert is_done(config, longer="trainer.max_steps")
    assert bytes_read() - before < size / 10
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"1")
    assert not is_done(config, longer="trainer.max_steps")
    with weights.open("wb") as file:
        file.truncate(size - 1)
    assert not is_done(config, longer="trainer.max_steps")


@pytest.mark.parametrize(
    "content", ['{"/export": {"mod', "", "[]", '{"/export": {}}', '{"exports": {"/export": null}}', "\udcff"]
)
def test_a_damaged_note_of_the_end_is_named_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    config = configuration(tmp_path)
    record_start(tmp_path, config, after="step_000000")
    (tmp_path / "done.json").write_bytes(content.encode(errors="surrogateescape"))
    assert not is_done(config, longer="trainer.max_steps")
    (record,) = caplog.records
    assert "done.json is damaged: the run goes on from its last checkpoint and exports anew" in record.message


def test_a_model_config_can_be_written(tmp_path: Path) -> None:
    """Tuples and mappings included."""
    record_start(tmp_path, ModelConfig(path="x"), after="step_000000")
    assert differences(tmp_path, ModelConfig(path="y")) == ['path: "x" -> "y"']


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes it another day."""

    def on(day: str) -> None:
        today = SimpleNamespace(today=lambda: date.fromisoformat(day))
        monkeypatch.setattr(starts, "date", today)

    return on


def test_the_day_of_the_first_start_is_that_of_the_later_ones(tmp_path: Path, on: Callable[[str], None]) -> None:
    for day in ("2026-02-28", "2026-03-01"):
        on(day)
        settle_today(config := configuration(tmp_path))
        assert config.data.today == "2026-02-28"
        record_start(tmp_path, config, after="step_000000")
        assert differences(tmp_path, config) == []
    settle_today(config := configuration(tmp_path, today="2020-01-01"))
    assert config.data.today == "2020-01-01"
    (tmp_path / "config.yaml").write_text("a: [1")
    settle_today(config := configuration(tmp_path))
    assert config.data.today == "2026-03-01"


def test_ranks_that_start_around_midnight_agree_on_the_day(
    tmp_path: Path, on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, day in (("1", "2026-02-28"), ("0", "2026-03-01")):
        monkeypatch.setenv("RANK", rank)
        on(day)
        settle_today(config := configuration(tmp_path / "run"))
        assert config.data.today == "2026-02-28"


def test_an_evaluation_that_goes_on_another_day_keeps_its_day(tmp_path: Path, on: Callable[[str], None]) -> None:
    """Else its prompts would be others, and the responses that it has would not be theirs."""
    for day in ("2026-02-28", "2026-03-01"):
        on(day)
        settle_today(config := configuration(tmp_path), recorded=False)
        assert config.data.today == "2026-02-28"


def test_another_programs_folder_is_refused_and_keeps_its_configuration(tmp_path: Path) -> None:
    record_start(tmp_path, PPOCriticConfig(), after="step_000000")
    before = (tmp_path / "config.yaml").read_bytes()
    config = configuration(tmp_path)
    settle_today(config)  # which finds no day in a server's configuration
    for refused in (
        lambda: is_done(config, longer="trainer.max_steps"),
        lambda: record_start(tmp_path, config, after="step_000000"),
    ):
        with pytest.raises(
            UserError, match=r"holds the run of a server, this is a supervised stage: choose another run.output_dir"
        ):
            refused()
    assert (tmp_path / "config.yaml").read_bytes() == before
