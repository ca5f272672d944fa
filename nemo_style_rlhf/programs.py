"""The programs: one function for each script in ``servers/`` and ``trainers/`` and for the command that setup.py names after it.

Each docstring is the text of ``--help``, between generated lists of options and presets (launch/usage.py).
Each function imports what it needs after its configuration is checked, so that mistakes, refused folders and refused ports are
reported before torch is loaded. Reward functions' processes import the script that started them and must not wait for torch.
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
ONE_RUN = "and a critic server belongs to one run: sweep with trainers/train_ppo_local.py, which starts one for each"
Launched = TypeVar("Launched", bound=LaunchedConfig)
NO_RUN = "and this program makes none: start it once for each setting"
EVERY_PHASE = "run one tiny step of every phase"
STEP_AND_BATCH = "run one optimizer step and one validation batch"


@entry_point(PPOCriticConfig, dry_run="run one tiny request of every kind", no_sweep=SERVER)
def serve_ppo_critic(config: PPOCriticConfig) -> None:
    """Serve values and rewards over HTTP, and train a critic on request: the server of trainers/train_ppo_actor.py.

    usage: python servers/serve_ppo_critic.py run.output_dir=DIR model.path=REWARD_MODEL [key=value ...]

    model.path is a reward model (docs/models.md), and the critic starts as its copy unless value_model.path is set.
    Without a reward model (reward_model.combine_rm_and_critic_server=false) model.path may be a language model, too.
    value_model.enabled=false serves only the reward model, for algorithms without a critic.

    The server listens on 127.0.0.1:5567 (server.host, server.port). Any address but loopback needs a token that the actor must
    know: server.token.token_file, or NSR_CRITIC_TOKEN in the environment. The server keeps running after the actor ends;
    SIGTERM, Ctrl-C or a critic_shutdown call end it with exit code 0. docs/protocol.md describes every endpoint.
    """
    from nemo_style_rlhf.precheck.programs import check_critic

    check_critic(config)
    from nemo_style_rlhf.checkpoint.owner import owned

    with owned(config.run, "server"):
        from nemo_style_rlhf.critic_service.binding import begin

        binding = begin(config.run, config.server, config.roles)
        from nemo_style_rlhf.critic_service.critic_server import load_critic_server
        from nemo_style_rlhf.critic_service.process import serve

        serve(config.run, config.server, binding, partial(load_critic_server, config))


@entry_point(RewardServerProcessConfig, dry_run="score two tiny texts", no_sweep=SERVER)
def serve_reward_model(config: RewardServerProcessConfig) -> None:
    """Serve rewards of texts over HTTP, without a critic: the server PPO (trainers/train_ppo_actor.py) asks with reward=server.

    usage: python servers/serve_reward_model.py model.path=REWARD_MODEL [key=value ...]

    model.path is a reward model, decoder or encoder (docs/models.md); tokenizer and chat template may differ from the policy's.

    The server listens on 127.0.0.1:5568 (server.host, server.port). Any address but loopback needs a token that the actor must
    know (reward.server.token): server.token.token_file, or NSR_CRITIC_TOKEN in the environment. SIGTERM or Ctrl-C end it with
    exit code 0. docs/protocol.md describes its two endpoints, critic_status and reward_infer.
    """
    from nemo_style_rlhf.precheck.programs import check_reward_server

    check_reward_server(config)
    from nemo_style_rlhf.critic_service.binding import begin

    binding = begin(config.run, config.server, ["reward"])
    from nemo_style_rlhf.critic_service.process import serve
    from nemo_style_rlhf.critic_service.reward_server import load_reward_server

    serve(config.run, config.server, binding, partial(load_reward_server, config))


@entry_point(EngineProcessConfig, no_sweep=SERVER)
def serve_engine(config: EngineProcessConfig) -> None:
    """Serve samples of a policy over HTTP, from the weights that a trainer publishes.

    usage: python servers/serve_engine.py model.path=POLICY [key=value ...]

    The engine listens on 127.0.0.1:5569 (server.host, server.port). Any address but loopback needs a token that its trainer
    must know: server.token.token_file, or NSR_CRITIC_TOKEN in the environment. SIGTERM or Ctrl-C end it with exit code 0.
    """
    from nemo_style_rlhf.wire.listening import take_address

    address = take_address(config.server)
    from nemo_style_rlhf.engines.process import serve

    serve(config, address)


@entry_point(PPOActorConfig, dry_run=EVERY_PHASE, no_sweep=lambda config: ONE_RUN if config.uses_critic_process else "")
def train_ppo_actor(config: PPOActorConfig) -> None:
    """PPO on a Hugging Face policy, against a running critic server (servers/serve_ppo_critic.py).

    usage: python trainers/train_ppo_actor.py run.output_dir=DIR model.path=MODEL data.train_path=PROMPTS [key=value ...]
    """
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


@entry_point(PPOLocalConfig, dry_run=EVERY_PHASE)
def train_ppo_local(config: PPOLocalConfig) -> None:
    r"""PPO on this host by one command: starts the critic server, the actor and its engines, each in its environment, restarts
    what dies, and ends them together.

    usage: python trainers/train_ppo_local.py run.output_dir=DIR model.path=MODEL data.train_path=PROMPTS \
               critic.model.path=REWARD_MODEL [key=value ...] [critic.key=value ...]

      key=...          arguments of trainers/train_ppo_actor.py, unchanged; critic.run has the values of run
      critic.key=...   arguments of servers/serve_ppo_critic.py, with critic. before each key; critic.engine=PRESET too
      ranks, critic_ranks      ranks of the actor and of the server, as torchrun starts them
      devices, critic_devices  their CUDA devices: devices=[0,1] critic_devices=[2]
      restarts         restarts of processes that die, before the next new step

    DIR gets actor/, critic/ and their logs; the policy ends up in DIR/actor/export. Ctrl-C ends all; the same command resumes.
    With algorithm=grpo (no critic) the server holds only the reward model; with reward=function, too, no server is started.
    """
    from nemo_style_rlhf.precheck.programs import check_launched

    check_launched(config)
    from nemo_style_rlhf.launch.ppo_local import run_on_this_host

    _launch(run_on_this_host, config)


@entry_point(PPORayConfig, dry_run=EVERY_PHASE)
def train_ppo_ray(config: PPORayConfig) -> None:
    r"""PPO on a Ray cluster by one command: starts the critic server, the actor and its engines on the cluster's nodes, each in
    its environment, restarts what dies, and ends them together. On a node of the cluster `ray job submit --` may be left out.

    usage: ray job submit -- .venv-actor/bin/python trainers/train_ppo_ray.py run.output_dir=DIR model.path=MODEL \
               data.train_path=PROMPTS critic.model.path=REWARD_MODEL [key=value ...] [critic.key=value ...]

      key=...          arguments of trainers/train_ppo_actor.py, unchanged; critic.run has the values of run
      critic.key=...   arguments of servers/serve_ppo_critic.py, with critic. before each key; critic.engine=PRESET too
      ranks, critic_ranks      processes of the actor and of the server in all, one for each GPU
      ray.actor_nodes, ray.critic_nodes      nodes on which they are
      generation.engines.count, generation.tensor_parallel_size      engines, and GPUs of each
      placement        separate or colocated
      restarts         restarts of processes that die, before the next new step

    DIR gets actor/, critic/ and their logs; the policy ends up in DIR/actor/export. Ctrl-C ends all; the same command resumes.
    With algorithm=grpo (no critic) the server holds only the reward model; with reward=function, too, no server is started.
    """
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
    """Make ``train`` own the run's folder, and not repeat a run that is done."""

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


@entry_point(SFTConfig, dry_run=STEP_AND_BATCH)
@_stage
def train_sft(config: SFTConfig) -> None:
    """Supervised fine-tuning of a causal language model.

    usage: python trainers/train_sft.py run.output_dir=DIR model.path=MODEL data.train_path=ROWS [key=value ...]
    """
    from nemo_style_rlhf.supervised.sft import train_sft

    train_sft(config)


@entry_point(RewardModelConfig, dry_run=STEP_AND_BATCH)
@_stage
def train_reward_model(config: RewardModelConfig) -> None:
    """A reward model from preference pairs.

    usage: python trainers/train_reward_model.py run.output_dir=DIR model.path=SFT_MODEL data.train_path=PAIRS [key=value ...]
    """
    from nemo_style_rlhf.supervised.reward_model import train_reward_model

    train_reward_model(config)


@entry_point(DPOConfig, dry_run=STEP_AND_BATCH)
@_stage
def train_dpo(config: DPOConfig) -> None:
    """Direct preference optimization (DPO, IPO, cDPO) on preference pairs.

    usage: python trainers/train_dpo.py run.output_dir=DIR model.path=SFT_MODEL data.train_path=PAIRS [key=value ...]
    """
    from nemo_style_rlhf.supervised.dpo import train_dpo

    train_dpo(config)


@entry_point(KTOConfig, dry_run=STEP_AND_BATCH)
@_stage
def train_kto(config: KTOConfig) -> None:
    """Kahneman-Tversky optimization (KTO) on responses that are desirable or not, or on preference pairs.

    usage: python trainers/train_kto.py run.output_dir=DIR model.path=SFT_MODEL data.train_path=ROWS [key=value ...]
    """
    from nemo_style_rlhf.supervised.kto import train_kto

    train_kto(config)


@entry_point(EvaluationConfig, dry_run="answer two prompts with a few tokens, write nothing")
def evaluate(config: EvaluationConfig) -> None:
    """Sample several checkpoints on the same prompts with the same seeds: texts to read and search, numbers to compare.

    usage: python trainers/evaluate.py run.output_dir=DIR data.path=PROMPTS "checkpoints=[NAME:MODEL,NAME:MODEL]" [key=value ...]

      reward.model.path=MODEL       scores of a reward model (docs/models.md lists what is read)
      reward.function.path=FILE     scores of a reward function, in place of the reward model's or added to them

    It writes to run.output_dir: results.jsonl (one object per prompt, checkpoint and sample), summary.json (one object per
    checkpoint). `python trainers/watch.py DIR` shows them side by side, and `--export FILE.html` makes one file of that.
    """
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


@entry_point(InspectDataConfig, no_sweep=NO_RUN)
def inspect_data(config: InspectDataConfig) -> None:
    """Show what a supervised stage trains on: tokens, the learned ones among them, and the dropped rows.

    usage: python trainers/inspect_data.py stage=STAGE model.path=MODEL data.train_path=ROWS [key=value ...]

    stage is sft, reward_model, dpo or kto; the data keys are its trainer's. On a terminal learned tokens are green (unless
    NO_COLOR is set); they are always in brackets.
    """
    from nemo_style_rlhf.precheck.programs import check_inspection

    check_inspection(config)
    from nemo_style_rlhf.supervised.inspection import inspect_data

    inspect_data(config)


@entry_point(TryRewardConfig, no_sweep=NO_RUN)
def try_reward(config: TryRewardConfig) -> None:
    """Try a reward function, endpoints or a judge on prompts and responses of a file, without any model.

    usage: python trainers/try_reward.py reward.function.path=FILE.py data.path=ROWS [key=value ...]

    reward=endpoints tries endpoints, reward=judge a judge. A table shows rewards, filtering scores and extra logs, the reasons
    of failures follow it; the exit code is 1 if any row has no reward.
    """
    from nemo_style_rlhf.evaluation.try_reward import try_reward

    raise SystemExit(0 if try_reward(config) else 1)


@entry_point(PlanConfig, no_sweep=NO_RUN)
def plan(config: PlanConfig) -> None:
    """Estimate the memory of a PPO run before it starts: each process's peak against the device's memory.

    usage: python trainers/plan.py ACTOR_ARGUMENTS [critic.KEY=VALUE ...] [device_gib=GIB] [ranks=N] [together=true]

      ACTOR_ARGUMENTS  arguments of trainers/train_ppo_actor.py, unchanged
      critic.KEY=...   arguments of servers/serve_ppo_critic.py, with critic. before each key; critic.engine=PRESET too
      device_gib       plan for a device of this size; else this machine's CUDA device, or this host
      device_tflops, device_gb_per_s  values of its data sheet: also estimate the seconds of a step's rollout and training
      run.device       cuda or cpu: the kind of device to plan for, regardless of this machine's
      ranks, critic_ranks  ranks of the actor and of the server, as torchrun starts them
      together         both processes share the devices

    No weights are read and nothing is written. Exit code 2 if it does not fit, with the changes that save most.
    """
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
        help="where the model lies from which the training started; by default value_model.path, or model.path if that is null",
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
    """Serve a page of runs to the browser."""
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
