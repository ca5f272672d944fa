"""The plan behind `trainers/plan.py`, from its checked configuration."""

from collections.abc import Collection
from dataclasses import asdict

from rich.console import Console

from nemo_style_rlhf.data.prompts import load_prompts, load_training_prompts
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.planning.actor import plan_actor, plan_engine
from nemo_style_rlhf.planning.advice import Change, best_changes
from nemo_style_rlhf.planning.blueprint import Blueprint
from nemo_style_rlhf.planning.critic import plan_critic
from nemo_style_rlhf.planning.device import Device, find_device
from nemo_style_rlhf.planning.phases import ACTOR, CRITIC, ENGINE, GIB, ProcessPlan
from nemo_style_rlhf.planning.report import table
from nemo_style_rlhf.planning.seconds import step_seconds
from nemo_style_rlhf.planning.turns import described, in_turns, largest, taking_turns
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.plan import PlanConfig


def plan(config: PlanConfig) -> None:
    """Print the peak memory of each process, and for a device of known speed the seconds of a step.

    Raises:
        UserError: the run does not fit, or it would refuse the models or prompts.
    """
    if not config.critic.model.path:
        config.critic.model.path = config.model.path  # assume a reward model made from the policy
    planner = Planner(config)
    processes = planner.plan(config)
    console = Console(highlight=False)
    console.print(f"GiB of each rank at the peak of its process, on {planner.device.name}:", soft_wrap=True)
    turns = in_turns(config, planner.device)
    console.print(table(processes, planner.device, together=config.together and not turns))
    if turns:
        console.print(f"In turns on one device: {described(processes)}", soft_wrap=True)
        over = processes if largest(processes) > planner.device.memory else []
    else:
        over = _too_large(processes, planner.device, together=config.together)
    if over:
        changes = best_changes(config, planner, [plan.name for plan in over])
        raise UserError(_refusal(over, planner.device, changes, turns=turns))
    if config.device_tflops is not None:
        console.print(planner.seconds(config, processes), soft_wrap=True, markup=False)


class Planner:
    """Plans variants of one run; reads and traces the shapes of each model once."""

    def __init__(self, config: PlanConfig) -> None:
        self.device: Device = find_device(config)
        self._longest_prompt = _longest_prompt(config)
        self._blueprints: dict[tuple[str, bool], Blueprint] = {}

    def plan(self, config: PlanConfig, names: Collection[str] = (ACTOR, ENGINE, CRITIC)) -> list[ProcessPlan]:
        """Plans of the processes in ``names``, as far as the run has them."""
        policy, critic = self._models(config)
        prompt = self._prompt_length(config, policy, critic)
        processes = []
        if ACTOR in names:
            processes.append(
                plan_actor(config, policy, self._reference(config, policy), self.device, prompt_length=prompt)
            )
        if ENGINE in names and config.generation.engines.count:
            processes.append(plan_engine(config, policy, self.device, prompt_length=prompt))
        if CRITIC in names and critic is not None:
            processes.append(
                plan_critic(config, critic, self._reward(config, critic), self.device, prompt_length=prompt)
            )
        return [taking_turns(plan) for plan in processes] if in_turns(config, self.device) else processes

    def seconds(self, config: PlanConfig, processes: Collection[ProcessPlan]) -> str:
        """An estimate of the seconds of a step, given the :meth:`plan` of the run."""
        policy, critic = self._models(config)
        (sampler,) = [plan for plan in processes if plan.name == (ENGINE if config.generation.engines.count else ACTOR)]
        return step_seconds(
            config,
            policy,
            critic if config.algorithm.uses_critic else None,
            prompt_length=self._prompt_length(config, policy, critic),
            cache=sampler.peak.parts["KV cache"],
            reference=self._reference(config, policy) if config.model.reference_path else None,
        )

    def demand(self, config: PlanConfig, names: Collection[str]) -> int:
        """Bytes that the processes ``names`` need on one device."""
        processes = self.plan(config, names)
        if in_turns(config, self.device):
            return largest(processes)
        return sum(on_device(plan, self.device) for plan in processes)

    def _models(self, config: PlanConfig) -> tuple[Blueprint, Blueprint | None]:
        """The policy, and if the run needs the critic server the critic, or the reward model if there is no critic."""
        critic = self._blueprint(config.critic_server.critic_start, scalar=True) if config.uses_critic_process else None
        return self._blueprint(config.model, scalar=False), critic

    def _reference(self, config: PlanConfig, policy: Blueprint) -> Blueprint | None:
        """The reference, if it is a model of its own."""
        if not config.needs_reference or not config.model.has_second_model:
            return None
        return self._blueprint(config.model.reference_model, scalar=False) if config.model.reference_path else policy

    def _reward(self, config: PlanConfig, critic: Blueprint) -> Blueprint:
        """The critic server's reward model; the critic starts from it without critic.value_model.path."""
        server = config.critic_server
        same = server.critic_start == server.model or not server.reward_model.combine_rm_and_critic_server
        return critic if same else self._blueprint(config.critic.model, scalar=True)

    def _blueprint(self, model: ModelConfig, *, scalar: bool) -> Blueprint:
        key = repr(asdict(model)), scalar
        if key not in self._blueprints:
            self._blueprints[key] = Blueprint(model, scalar=scalar, cuda=self.device.cuda)
        return self._blueprints[key]

    def _prompt_length(self, config: PlanConfig, policy: Blueprint, critic: Blueprint | None) -> int:
        """Length in tokens of the longest prompt; without prompts, of the longest that the settings allow."""
        response, longest = config.generation.max_length, self._longest_prompt
        limits = [(policy.max_positions, f"positions of {config.model.path}")]
        if config.model.reference_path:
            reference = self._blueprint(config.model.reference_model, scalar=False)
            limits.append((reference.max_positions, f"positions of {config.model.reference_path}"))
        if critic is not None:
            limits += [
                (critic.max_positions, f"positions of {config.critic_server.critic_start.path}"),
                (config.critic.server.max_length, "tokens of critic.server.max_length"),
            ]
            if (reward := self._reward(config, critic)) is not critic:
                limits.append((reward.max_positions, f"positions of {config.critic.model.path}"))
        limit, of = min((limit or 2**31, of) for limit, of in limits)
        if longest is None:
            config.generation.require_room(limit, of)
            return min(config.data.max_prompt_length, limit - response)
        if longest + response > limit:
            raise UserError(
                f"a prompt of {longest} tokens and generation.max_length={response} are more than the {limit} {of}: lower "
                "data.max_prompt_length or generation.max_length"
            )
        return longest


def on_device(plan: ProcessPlan, device: Device) -> int:
    """Bytes that ``plan`` needs on a device: each rank has its own GPU, but all ranks share one host."""
    return plan.peak.total * (1 if device.cuda else plan.ranks)


def _longest_prompt(config: PlanConfig) -> int | None:
    """Length in tokens of the longest prompt for training or validation; None without prompts so far."""
    if not config.data.train_path and not config.data.mixture:
        return None
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    whole = config.algorithm.old_logprobs == "sampler"
    prompts = load_training_prompts(config.data, tokenizer, whole_distribution=whole).rows
    if config.data.val_path:
        prompts += load_prompts(config.data.val_path, config.data, tokenizer)[0]
    return max(len(prompt.token_ids) for prompt in prompts)


def _too_large(processes: list[ProcessPlan], device: Device, *, together: bool) -> list[ProcessPlan]:
    if together:
        return processes if sum(on_device(plan, device) for plan in processes) > device.memory else []
    return [plan for plan in processes if on_device(plan, device) > device.memory]


def _refusal(over: list[ProcessPlan], device: Device, changes: list[Change], *, turns: bool) -> str:
    needs = " and ".join(f"the {plan.name} needs {on_device(plan, device) / GIB:.1f} GiB" for plan in over)
    if turns:
        needs = f"the largest turn needs {largest(over) / GIB:.1f} GiB, {described(over)},"
    saves = ", ".join(f"{change.text} ({change.saved / GIB:.1f} GiB)" for change in changes)
    advice = (
        f"what saves most: {saves}"
        if changes
        else "no single setting saves anything: use a smaller model or a larger device"
    )
    return f"{needs} but the device is {device.name}; {advice}"
