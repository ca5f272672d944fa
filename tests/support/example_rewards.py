"""Reward functions of examples/rewards, loaded and called as a trainer does."""

import importlib.util

from tests.support.paths import ROOT

REWARDS = ROOT / "examples" / "rewards"
PROMPT = "Question: 7? #### 1 \\boxed{2} ```python\nadd = None\n``` "


def load(name):
    spec = importlib.util.spec_from_file_location(name, REWARDS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewards_of(module, responses, labels):
    answer = module.reward_func([PROMPT + response for response in responses], [PROMPT] * len(responses), labels)
    return answer["rewards"] if isinstance(answer, dict) else answer
