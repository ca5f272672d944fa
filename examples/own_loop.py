"""GRPO in your own loop, from the package's public parts: a policy learns to write the letter e.

    .venv-actor/bin/python examples/own_loop.py MODEL

MODEL is a small causal language model, a folder or a hub name. nemo_style_rlhf/parts.py lists the public parts."""

import sys
from collections.abc import Iterator

import torch

from nemo_style_rlhf import parts as nsr

STEPS, GROUP, TOKENS, LONGEST, KL, LR = 16, 16, 12, 64, 0.01, 3e-3
PROMPTS = ["once upon a time", "the old house", "my best friend", "in the morning"]


def reward(response: str) -> float:
    return response.count("e") / max(len(response), 1)


def train(path: str) -> Iterator[float]:
    """Train the model in ``path``; yields the mean reward of every step."""
    device, tokenizer = nsr.setup(nsr.RunConfig(seed=1)), nsr.load_tokenizer(path)
    model, config = nsr.ModelConfig(path=path, dtype="float32"), nsr.EngineConfig(optim=nsr.OptimizerConfig(lr=LR))
    prompts = [nsr.Prompt(number, tokenizer(text)["input_ids"], text) for number, text in enumerate(PROMPTS)]
    policy = nsr.Engine(nsr.PolicyModel(nsr.load_causal_lm(model)), config, device=device)
    reference = nsr.FrozenCopy(nsr.PolicyModel(nsr.load_causal_lm(model)), config, device, nsr.Ranks())
    sampling, shapes = nsr.GenerationConfig(backend="hf"), nsr.shapes_of(policy.hf_weights())
    settings = {"tokenizer": tokenizer, "device": device, "seed": 1, "max_model_len": LONGEST, "weight_shapes": shapes}
    generator = nsr.make_generator(model, sampling, **settings)
    probe = nsr.Probe(prompts, len(tokenizer), max_length=LONGEST, max_gap=1e-3)
    for step in range(STEPS):
        stream = generator.stream(version=step)  # GROUP responses to each prompt, in the order of the prompts
        stream.submit(nsr.make_requests(prompts, step=step, samples_per_prompt=GROUP, max_tokens=TOKENS, run_seed=1))
        completions = sorted(stream.completed(), key=lambda each: each.request.sample)
        rollouts = [nsr.Rollout.from_completion(each, prompts[each.request.sample.prompt_id]) for each in completions]
        rewards = torch.tensor([reward(tokenizer.decode(rollout.response_tokens)) for rollout in rollouts])
        lengths = [len(rollout.tokens) for rollout in rollouts]  # the samples lie end to end, N tokens in all
        tokens, mask = torch.cat([rollout.tokens for rollout in rollouts]), nsr.action_mask(rollouts)
        old = nsr.action_aligned([rollout.sampler_logprobs for rollout in rollouts])
        ref = reference.logprobs(tokens, lengths, mask)
        advantages = nsr.group_advantages(rewards, GROUP, kind="grpo").repeat_interleave(torch.tensor(lengths))
        total = float(mask.sum())  # micro-batches add up to the mean over all tokens
        for batch, _ in nsr.micro_batch_iterator(tokens, lengths, mask, config, device, nsr.Ranks()):
            new = batch.rows(policy(batch.input_ids, batch.action_mask).logprobs)
            was, at_start, gain = (batch.rows(flat[batch.positions]) for flat in (old, ref, advantages))
            surrogate = nsr.policy_loss(
                new, was, gain, batch.action_mask, clip_low=0.2, clip_high=0.2, normalizer=total
            )
            kl = nsr.kl_loss(new, at_start, kind="k3", unbiased=False).sum() / total
            policy.backward(surrogate.loss + KL * kl)
        policy.step()
        generator.load(nsr.OwnWeights(step + 1, policy.hf_weights(), probe.target(policy)))
        yield float(rewards.mean())


if __name__ == "__main__":
    for step, mean in enumerate(train(sys.argv[1]), start=1):
        print(f"step {step}: reward {mean:.3f}")
