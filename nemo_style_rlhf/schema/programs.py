"""The keys of each program: the name of its file in ``conf/``, and the dataclass that holds its keys."""

from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.engine_process import EngineProcessConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.inspection import InspectDataConfig
from nemo_style_rlhf.schema.local import PPOLocalConfig
from nemo_style_rlhf.schema.plan import PlanConfig
from nemo_style_rlhf.schema.ray import PPORayConfig
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.schema.supervised import DPOConfig, KTOConfig, RewardModelConfig, SFTConfig
from nemo_style_rlhf.schema.try_reward import TryRewardConfig

PROGRAMS: dict[str, tuple[str, type]] = {
    "serve_ppo_critic": ("ppo_critic", PPOCriticConfig),
    "serve_reward_model": ("reward_server", RewardServerProcessConfig),
    "serve_engine": ("engine", EngineProcessConfig),
    "train_ppo_actor": ("ppo_actor", PPOActorConfig),
    "train_ppo_local": ("ppo_local", PPOLocalConfig),
    "train_ppo_ray": ("ppo_ray", PPORayConfig),
    "train_sft": ("sft", SFTConfig),
    "train_reward_model": ("reward_model", RewardModelConfig),
    "train_dpo": ("dpo", DPOConfig),
    "train_kto": ("kto", KTOConfig),
    "evaluate": ("evaluate", EvaluationConfig),
    "inspect_data": ("inspect_data", InspectDataConfig),
    "try_reward": ("try_reward", TryRewardConfig),
    "plan": ("plan", PlanConfig),
}
"""File in ``conf/`` and schema of each program, by the name of its script."""
SCHEMAS = dict(PROGRAMS.values())
"""Schema of each program, by the name of its file in ``conf/``."""
