"""An environment of the tests' word models, in which attempts fail in every way, decided by the seed of the sample alone."""

import asyncio
import os
import random
import signal
import time

from nemo_style_rlhf.agents.environment import Action, Environment, Observation, Task

KINDS = ("raises", "never answers", "blocks", "leaves", "kills itself", "answers garbage", "always raises")
SHARE = 0.25
"""Of the episodes that have trouble."""
TURNS = 4


class Troubled(Environment):
    """Rewards short words; says more words after each answer."""

    async def reset(self, task: Task) -> Observation:
        self.random = random.Random(task.seed)
        trouble = self.random.random() < SHARE
        self.trouble = self.random.choice(KINDS) if trouble else None
        if task.attempt > 1 and self.trouble != "always raises":
            self.trouble = None
        self.turns = self.random.randint(1, TURNS)
        await asyncio.sleep(random.uniform(0, 0.05))  # the order in which episodes go on differs from run to run
        return Observation(sampling={"max_length": 5}, messages=" ".join(self.words()) if self.turns == 2 else ())

    async def step(self, action: Action) -> Observation:
        match self.trouble:
            case "raises" | "always raises":
                raise RuntimeError("the game is broken")
            case "never answers":
                await asyncio.sleep(1000)
            case "blocks":
                time.sleep(1000)
            case "leaves":
                os._exit(3)
            case "kills itself":
                os.kill(os.getpid(), signal.SIGKILL)
            case "answers garbage":
                return "garbage"  # type: ignore[return-value]
        await asyncio.sleep(random.uniform(0, 0.02))
        reward, done = -0.1 * len(action.text.split()), action.turn + 1 >= self.turns
        score = reward if done else None
        return Observation(
            " ".join(self.words()), reward, done, score, {"max_length": 4}, {"words": len(action.text.split())}
        )

    def words(self) -> list[str]:
        return [f"w{self.random.randrange(60)}" for _ in range(self.random.randint(1, 4))]
