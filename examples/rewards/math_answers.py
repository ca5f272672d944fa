r"""1 for a response whose final answer equals the label, else 0; for GSM8K and other mathematics with one answer.

    .venv-actor/bin/python trainers/train_ppo_actor.py algorithm=grpo reward=function \
        reward.function.path=examples/rewards/math_answers.py data.train_path=gsm8k/train.jsonl \
        data.prompt_key=question data.label_key=answer model.path=$POLICY run.output_dir=outputs/math

The final answer of a response is what follows its last `####`, else its last \boxed{}, else its last number; labels are
read alike, or are an expression as a whole. Equality is math-verify's: 1,080 = 1\,080 = 1.08e3, \frac{1}{2} = 0.5; a
percent sign at the end is left out.
"""

import re
from typing import Any

from math_verify import parse, verify

_NUMBER = re.compile(r"-?\d+(?:(?:,|\\,|\{,\})\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?(?:/\d+)?")
_SPACE = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3})")
_POWER = re.compile(r"(?<=\d)[eE]([+-]?\d+)")
_UNIT = re.compile(r"(?<=\d)\s+[A-Za-z][A-Za-z ]+$")


def reward_func(queries: list[str], prompts: list[str], labels: list[str | None]) -> dict[str, Any]:
    """Rewards, and which responses had an answer at all."""
    rewards, answered = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        if label is None:
            raise ValueError("math_answers.py needs the reference answers: set data.label_key")
        if not (expected := read(final_answer(label) or label)):
            raise ValueError(f"the label {label[-80:]!r} has no answer that can be read as mathematics")
        answer = final_answer(response := query[len(prompt) :]) or last_number(response)
        rewards.append(float(answer is not None and verify(expected, read(answer))))
        answered.append(float(answer is not None))
    return {"rewards": rewards, "extra_logs": {"answered": answered}}


def final_answer(text: str) -> str | None:
    """The answer that a text marks as final."""
    if "####" in text:
        lines = text.rsplit("####", 1)[1].strip().splitlines()
        return _UNIT.sub("", lines[0].strip(" $*").rstrip(".* ")) if lines else None
    if (start := text.rfind(r"\boxed{")) >= 0:
        start, depth = start + len(r"\boxed{"), 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def read(answer: str) -> list[Any]:
    """The answer as math-verify parses it; empty if it is not mathematics."""
    answer = answer.removesuffix("%").removesuffix("\\")
    answer = _POWER.sub(r" \\times 10^{\1}", _SPACE.sub("", answer))
    return parse(rf"\boxed{{{answer}}}", fallback_mode="no_fallback")
