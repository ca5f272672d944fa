"""A cheap reward function for benchmarks/grpo_step.py: what is measured is the trainer."""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    return [float(len(set(query.split()))) for query in queries]
