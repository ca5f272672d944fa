"""Settings that other projects have as flags, and the values that they refuse."""

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.composition import compose
from nemo_style_rlhf.schema.actor import CheckpointConfig, PPOActorConfig
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.supervised import SupervisedCheckpointConfig


@pytest.mark.parametrize(("interval", "due"), [(-1, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (50, [0])])
def test_an_interval_of_minus_1_asks_for_no_checkpoint_before_the_end(interval: int, due: list[int]) -> None:
    config = build(CheckpointConfig, OmegaConf.create({"save_interval": interval}))
    assert [step for step in range(6) if config.is_due(step)] == due


@pytest.mark.parametrize(
    ("schema", "refused"), [(CheckpointConfig, (0, -2)), (SupervisedCheckpointConfig, (-2,))], ids=["PPO", "supervised"]
)
def test_other_intervals_are_refused(schema: type, refused: tuple[int, ...]) -> None:
    for interval in refused:
        with pytest.raises(UserError, match=rf"save_interval={interval} is not possible: .*-1 for the last step alone"):
            build(schema, OmegaConf.create({"save_interval": interval}))
    assert build(schema, OmegaConf.create({"save_interval": -1})).save_interval == -1


def test_a_division_that_is_turned_off_twice_is_refused_with_what_was_meant() -> None:
    settings = {"advantage_std_norm": False, "normalize_advantages": False}
    with pytest.raises(
        UserError, match=r"advantage_std_norm=false only changes whitening.*advantage_estimator=dr_grpo"
    ):
        build(AlgorithmConfig, OmegaConf.create(settings))
    assert build(AlgorithmConfig, OmegaConf.create({"advantage_std_norm": False})).normalize_advantages


def test_a_reference_that_nothing_would_read_or_move_is_refused() -> None:
    def built(*given: str) -> PPOActorConfig:
        return build(
            PPOActorConfig, OmegaConf.from_dotlist(["run.output_dir=x", "model.path=x", "data.train_path=x", *given])
        )

    other, adapters, offload = "model.reference_path=y", "model.lora.rank=4", "model.reference=cpu_offload"
    no_kl = "algorithm.initial_policy_kl_penalty=0"
    assert (
        built(other, adapters, offload).model.reference_model
        == built("model.path=y", offload, other).model.reference_model
    )
    built(other, no_kl, "audit.health.max_init_policy_kl=1")
    built("model.reference_path=''", no_kl)
    with pytest.raises(UserError, match=r"reference_path=y but nothing measures KL: .*, or model.reference_path=null"):
        built(other, no_kl)
    for empty in ("null", "''"):
        with pytest.raises(
            UserError, match=r"reference=cpu_offload but with model\.lora\.rank=4 there is no second model"
        ):
            built(f"model.reference_path={empty}", adapters, offload)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=5", "min_length=2"])
def test_a_correction_needs_log_probabilities_of_the_whole_distribution(cut: str) -> None:
    paths = ["run.output_dir=x", "model.path=x", "data.train_path=x"]
    for correction in ("algorithm.correction.kind=tis", "algorithm.staleness=1"):
        given = [*paths, correction, "generation.engines.count=1", f"generation.{cut}"]
        if "staleness" in correction:
            given.append("algorithm.correction.kind=tis")
        with pytest.raises(
            UserError,
            match=rf"correction\.kind=tis .*generation\.{cut} .*top_p=1, generation\.top_k=0 and .*min_length=0",
        ):
            build(PPOActorConfig, OmegaConf.from_dotlist(given))
    build(PPOActorConfig, OmegaConf.from_dotlist([*paths, f"generation.{cut}"]))


def test_adapters_have_dropout_only_where_dropout_is_on() -> None:
    build(ModelConfig, OmegaConf.from_dotlist(["path=x", "lora.dropout=0.1"]))  # no adapters
    adapters = ["path=x", "lora.rank=4", "lora.dropout=0.1"]
    with pytest.raises(
        UserError, match=r"lora\.dropout=0\.1 needs model\.disable_dropout=false, which is true: set it"
    ):
        build(ModelConfig, OmegaConf.from_dotlist(adapters))
    build(ModelConfig, OmegaConf.from_dotlist([*adapters, "disable_dropout=false"]))


@pytest.mark.parametrize("launcher", ["ppo_local", "ppo_ray"])
def test_a_launcher_hands_every_setting_of_the_run_on_to_the_critic_server(launcher: str) -> None:
    run = compose(launcher).critic.run
    handed_on = {
        name: f"${{run.{name}}}" for name in RunConfig.__dataclass_fields__ if name not in ("output_dir", "dry_run")
    }
    assert {name: OmegaConf.to_container(run)[name] for name in handed_on} == handed_on
