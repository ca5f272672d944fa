"""The programs: one function for each script in ``servers/`` and ``trainers/`` and for the command that setup.py names after it.

Each imports what it needs once its configuration is checked: a mistake is reported, and refused folders and ports are named,
before torch is loaded. Reward functions' processes, too, import the script that started them and must not wait for torch.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.entry import entry_point, refuse
from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT, Preempted, hold_stop_signal
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.engine_process import EngineProcessConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.inspection import InspectDataConfig
from nemo_style_rlhf.schema.local import PPOLocalConfig
from nemo_style_rlhf.schema.pair import LaunchedConfig
from nemo_style_rlhf.schema.plan import PlanConfig
from nemo_style_rlhf.schema.ray import PPORayConfig
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.schema.supervised import DPOConfig, KTOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from nemo_style_rlhf.schema.try_reward import TryRewardConfig

SERVER = "and a server does not end: start each by a command of its own"
ONE_RUN = (
    "and a critic server belongs to one run: sweep with trainers/train_ppo_local.py, which starts a server for each"
)
Launched = TypeVar("Launched", bound=LaunchedConfig)
NO_RUN = "and this program makes none: start it once for each setting"


@entry_point(PPOCriticConfig, config_name="ppo_critic", no_sweep=lambda config: SERVER)
def serve_ppo_critic(config: PPOCriticConfig) -> None:
    """The critic process."""
    from nemo_style_rlhf.precheck.programs import check_critic

    check_critic(config)
    from nemo_style_rlhf.checkpoint.owner import owned

    with owned(config.run, "server"):
        from nemo_style_rlhf.critic_service.binding import begin

        binding = begin(config.run, config.server, config.roles)
        from nemo_style_rlhf.critic_service.critic_server import load_critic_server
        from nemo_style_rlhf.critic_service.process import serve

        serve(config.run, config.server, binding, partial(load_critic_server, config))


@entry_point(RewardServerProcessConfig, config_name="reward_server", no_sweep=lambda config: SERVER)
def serve_reward_model(config: RewardServerProcessConfig) -> None:
    """A reward model alone."""
    from nemo_style_rlhf.precheck.programs import check_reward_server

    check_reward_server(config)
    from nemo_style_rlhf.critic_service.binding import begin

    binding = begin(config.run, config.server, ["reward"])
    from nemo_style_rlhf.critic_service.process import serve
    from nemo_style_rlhf.critic_service.reward_server import load_reward_server

    serve(config.run, config.server, binding, partial(load_reward_server, config))


@entry_point(EngineProcessConfig, config_name="engine", no_sweep=lambda config: SERVER)
def serve_engine(config: EngineProcessConfig) -> None:
    """A generation engine."""
    from nemo_style_rlhf.wire.listening import take_address

    address = take_address(config.server)
    from nemo_style_rlhf.engines.process import serve

    serve(config, address)


@entry_point(
    PPOActorConfig, config_name="ppo_actor", no_sweep=lambda config: ONE_RUN if config.uses_critic_process else None
)
def train_ppo_actor(config: PPOActorConfig) -> None:
    """The actor process: PPO on a policy, against a running critic server."""
    hold_stop_signal()
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import is_done, settle_today

    settle_today(config)
    if is_done(config, longer="algorithm.max_steps"):
        return
    from nemo_style_rlhf.precheck.programs import check_actor

    check_actor(config)
    with owned(config.run, "trainer"):
        from nemo_style_rlhf.ppo.run import run

        run(config)


@entry_point(PPOLocalConfig, config_name="ppo_local")
def train_ppo_local(config: PPOLocalConfig) -> None:
    """Both processes of PPO on this host, and the engines."""
    from nemo_style_rlhf.precheck.programs import check_launched

    check_launched(config)
    from nemo_style_rlhf.launch.ppo_local import run_on_this_host

    _launch(run_on_this_host, config)


@entry_point(PPORayConfig, config_name="ppo_ray")
def train_ppo_ray(config: PPORayConfig) -> None:
    """Both processes of PPO on a Ray cluster, and the engines."""
    from nemo_style_rlhf.precheck.programs import check_launched

    check_launched(config)
    from nemo_style_rlhf.launch.ppo_ray import run_on_ray

    _launch(run_on_ray, config)


def _launch(run: Callable[[Launched], int], config: Launched) -> None:
    """Own the run's folder until every process has ended; exit as the actor did."""
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.launch.local import ProgramFailed

    with owned(config.run, "launcher"):
        try:
            code = run(config)
        except ProgramFailed as error:
            print(f"failed: {error}", file=sys.stderr)
            code = 1
    raise SystemExit(code)


Stage = TypeVar("Stage", bound=SupervisedConfig)


def _stage(train: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """Have ``train`` own the run's folder, and a run that is done not begin again."""

    @functools.wraps(train)
    def owning(config: Stage) -> None:
        hold_stop_signal()
        from nemo_style_rlhf.checkpoint.owner import owned
        from nemo_style_rlhf.checkpoint.starts import is_done, settle_today

        settle_today(config)
        if is_done(config, longer="trainer.max_steps"):
            return
        from nemo_style_rlhf.precheck.programs import check_stage

        check_stage(config)
        with owned(config.run, "trainer"):
            try:
                train(config)
            except Preempted as told:
                raise SystemExit(PREEMPTED_EXIT) from told

    return owning


@entry_point(SFTConfig, config_name="sft")
@_stage
def train_sft(config: SFTConfig) -> None:
    """Supervised fine-tuning."""
    from nemo_style_rlhf.supervised.sft import train_sft

    train_sft(config)


@entry_point(RewardModelConfig, config_name="reward_model")
@_stage
def train_reward_model(config: RewardModelConfig) -> None:
    """A reward model from preference pairs."""
    from nemo_style_rlhf.supervised.reward_model import train_reward_model

    train_reward_model(config)


@entry_point(DPOConfig, config_name="dpo")
@_stage
def train_dpo(config: DPOConfig) -> None:
    """DPO, IPO and cDPO on preference pairs."""
    from nemo_style_rlhf.supervised.dpo import train_dpo

    train_dpo(config)


@entry_point(KTOConfig, config_name="kto")
@_stage
def train_kto(config: KTOConfig) -> None:
    """KTO on judged responses."""
    from nemo_style_rlhf.supervised.kto import train_kto

    train_kto(config)


@entry_point(EvaluationConfig, config_name="evaluate")
def evaluate(config: EvaluationConfig) -> None:
    """Compare checkpoints on the same prompts."""
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import settle_today
    from nemo_style_rlhf.precheck.programs import check_evaluation

    check_evaluation(config)

    with owned(config.run, "evaluation"):
        settle_today(config, recorded=False)
        from nemo_style_rlhf.evaluation.child import ChildSampler

        with closing(ChildSampler(config)) as sampler:
            from nemo_style_rlhf.evaluation.run import evaluate

            evaluate(config, sampler)


@entry_point(InspectDataConfig, config_name="inspect_data", no_sweep=lambda config: NO_RUN)
def inspect_data(config: InspectDataConfig) -> None:
    """Show tokenized training samples."""
    from nemo_style_rlhf.precheck.programs import check_inspection

    check_inspection(config)
    from nemo_style_rlhf.supervised.inspection import inspect_data

    inspect_data(config)


@entry_point(TryRewardConfig, config_name="try_reward", no_sweep=lambda config: NO_RUN)
def try_reward(config: TryRewardConfig) -> None:
    """A reward on a file of responses."""
    from nemo_style_rlhf.evaluation.try_reward import try_reward

    raise SystemExit(0 if try_reward(config) else 1)


@entry_point(PlanConfig, config_name="plan", no_sweep=lambda config: NO_RUN)
def plan(config: PlanConfig) -> None:
    """The memory of both processes before they start."""
    from nemo_style_rlhf.planning.run import plan

    plan(config)


def merge_lora() -> None:
    """Merge a LoRA adapter into its base model."""
    parser = argparse.ArgumentParser(
        description="Merge a LoRA adapter into the model it was trained from: a plain Hugging Face directory."
    )
    parser.add_argument("adapter", help="a folder with adapter_config.json, such as <run.output_dir>/export_adapter")
    parser.add_argument("target", type=Path, help="where the merged model goes")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the base model"
    )
    arguments = parser.parse_args()

    from nemo_style_rlhf.models.lora import merge_adapter

    try:
        merge_adapter(arguments.adapter, arguments.target, trust_remote_code=arguments.trust_remote_code)
    except UserError as error:
        refuse(str(error))


def export_checkpoint() -> None:
    """Turn a checkpoint into a Hugging Face directory."""
    parser = argparse.ArgumentParser(
        description="Turn a checkpoint of actor, critic server or supervised stage into a plain Hugging Face directory, "
        "adapters merged, as the run's export would be after that step; a reward model lacks the statistics of its rewards, "
        "which training computes at its end."
    )
    parser.add_argument("checkpoint", type=Path, help="such as <run.output_dir>/checkpoints/step_000050")
    parser.add_argument("target", type=Path, help="a new folder for the model")
    parser.add_argument(
        "--model",
        help="where the model lies from which the training started; by default its model.path, or critic.path if that is set",
    )
    arguments = parser.parse_args()

    from nemo_style_rlhf.launch.bootstrap import setup

    setup(RunConfig(output_dir=str(arguments.target), device="cpu"))
    from nemo_style_rlhf.conversion.checkpoints import export_checkpoint

    try:
        export_checkpoint(arguments.checkpoint, arguments.target, model=arguments.model)
    except UserError as error:
        refuse(str(error))
    print(f"exported {arguments.checkpoint} to {arguments.target}")


def export_rollouts() -> None:
    """Print the samples of a run as JSON Lines."""
    parser = argparse.ArgumentParser(
        description="Print the samples that a run has written to its rollouts/ as JSON Lines: texts, rewards, and every token's "
        "numbers. https://duckdb.org, pandas and datasets read its Parquet files as they are, too."
    )
    parser.add_argument("run", type=Path, help="the actor's run.output_dir, or that of train_ppo_local")
    parser.add_argument("--first", type=int, default=0, metavar="STEP", help="leave out earlier steps")
    parser.add_argument("--last", type=int, metavar="STEP", help="leave out later steps")
    parser.add_argument("--no-tokens", action="store_true", help="leave out what is a list, one entry per token")
    arguments = parser.parse_args()

    from nemo_style_rlhf.tracking.rollout_files import print_jsonl

    try:
        print_jsonl(arguments.run, arguments.first, arguments.last, tokens=not arguments.no_tokens)
    except UserError as error:
        refuse(str(error))
    except BrokenPipeError:  # head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def watch() -> None:
    """A page of runs, in the browser."""
    parser = argparse.ArgumentParser(
        description="Serve a page of runs, while they train and afterwards: metrics, health, phases, rollouts. It reads the "
        "runs' files, writes nothing into them, and needs no network."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="runs, or folders above them, such as outputs/*")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; any but loopback needs a token")
    parser.add_argument("--port", type=int, default=5590, help="0 takes a free one")
    parser.add_argument(
        "--token-file", help="a file with the secret that opens the page (or in the environment: NSR_WATCH_TOKEN)"
    )
    parser.add_argument("--certificate", help="PEM file, certificate and chain: serve https")
    parser.add_argument("--key", help="PEM file with the certificate's private key")
    parser.add_argument(
        "--export", type=Path, metavar="REPORT.html", help="write the page to one file that needs no server, and end"
    )
    arguments = vars(parser.parse_args())

    from nemo_style_rlhf.watch.server import watch

    try:
        watch(**arguments)
    except UserError as error:
        refuse(str(error))
