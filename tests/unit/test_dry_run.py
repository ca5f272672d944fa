"""What a dry run changes about a run."""

from pathlib import Path

from omegaconf import OmegaConf

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.ppo.build import _run_id
from nemo_style_rlhf.ppo.run import tiny_run
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build


def test_a_run_that_must_resume_can_be_tried_too(tmp_path: Path) -> None:
    given = [f"run.output_dir={tmp_path}", "run.resume=must", "model.path=x", "data.train_path=x"]
    config = build(PPOActorConfig, OmegaConf.from_dotlist(given))
    tiny = tiny_run(config)
    assert _run_id(tiny, CheckpointStore(Path(tiny.run.output_dir) / "checkpoints", 2))
    assert config.run.resume == "must"
