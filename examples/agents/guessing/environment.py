"""A guessing game: the policy guesses a number from 1 to 32, and hears whether it is higher or lower."""

import random

from nemo_style_rlhf.agents.environment import Action, Environment, Observation, Task

NUMBERS = 32
ONE_TOKEN = {"max_length": 1}
"""Every number is one token, so that a guess needs no end."""


class Game(Environment):
    """Every guess costs 1, so that the shortest game has the highest reward."""

    async def reset(self, task: Task) -> Observation:
        self.number = random.Random(task.seed).randint(1, NUMBERS)
        return Observation(sampling=ONE_TOKEN)  # without messages, the policy reads the row's prompt

    async def step(self, action: Action) -> Observation:
        guess = action.text.strip()
        if guess == str(self.number):
            return Observation(reward=-1, done=True, metrics={"found": 1})
        answer = " higher" if guess.isdigit() and int(guess) < self.number else " lower"
        return Observation(answer, reward=-1, sampling=ONE_TOKEN, metrics={"found": 0})
