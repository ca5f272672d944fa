"""HTTP servers that give rewards: endpoints that compute them, and judges, language models that are asked for a verdict."""

import difflib
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.templates import rubric_text

LABEL = "{label}"
RUBRIC_PLACEHOLDERS = ("{prompt}", "{response}", "{turns}", LABEL)
ROUTE = "/chat/completions"
OWN_KEYS = ("model", "messages", "temperature", "max_tokens", "seed", "stream", "n")
"""Keys of a request that extra_body may not set."""
AB = {"A": 1.0, "B": 0.0}


@dataclass
class HttpSourceConfig:
    """Interchangeable HTTP servers that give rewards."""

    section: ClassVar[str]
    """Prefix of the source's configuration keys."""
    called: ClassVar[str]
    """Name of a server in errors."""

    urls: list[str] = field(default_factory=list)
    """Addresses of interchangeable servers. Each request goes to the least busy healthy one."""
    weight: float = 0.0
    """Weight of these rewards in the sum over all sources; with 0 no request is sent."""
    timeout_s: float = setting(60.0, gt=0, expected="seconds above 0")
    """Longest silence of a server during a request."""
    retries: int = setting(3, ge=0, expected="a number from 0 up")
    """Further attempts of a request, on another server if there is one, else 0.5 s apart at first, up to 10 s."""
    cooldown_s: float = setting(10.0, ge=0, expected="seconds from 0 up")
    """Seconds for which a failed server is left out, while others answer."""

    def validate(self) -> None:
        if self.weight != 0 and not self.urls:
            raise UserError(f"{self.section}.weight={self.weight} needs addresses: set {self.section}.urls")
        for url in self.urls:
            require(url.startswith(("http://", "https://")), f"{self.section}.urls", url, "http://... or https://...")


@dataclass
class EndpointRewardConfig(HttpSourceConfig):
    """HTTP endpoints that take POST {"query": [...], "prompts": [...], "labels": [...]} and answer as reward functions do."""

    section: ClassVar[str] = "reward.endpoints"
    called: ClassVar[str] = "reward endpoint"


@dataclass
class VerdictConfig:
    """Conversion of a judge's answer to a reward. An answer without a verdict is a failed sample, see reward.on_error."""

    kind: str = setting("number", among=("number", "choice", "json"))
    """number: the last number that pattern finds. choice: the last of the choices that pattern finds. json: the value of json_key
    in the last JSON object of the answer that has it: a number, a boolean, or the text of a number or of a choice."""
    pattern: str | None = None
    """Regular expression for number and choice. Its first group that takes part in a match counts, or else the whole match. null
    takes an answer that is only the verdict, or `Score: 7/10`, `Verdict: A` or `[[7]]`."""
    choices: dict[str, float] = field(default_factory=dict)
    """Reward by choice, for choice and json; empty is {A: 1, B: 0}, for a rubric in which A stands for the response and B for the
    reference answer, or A for correct and B for incorrect."""
    json_key: str = "score"
    """Key of the verdict in the JSON object, for kind=json."""
    low: float | None = None
    """The lowest number of the rubric's scale, whose reward is 0; null leaves numbers as they are. A number outside the scale is
    not a verdict."""
    high: float | None = None
    """The highest number of the scale, whose reward is 1."""

    def validate(self) -> None:
        key = "reward.judge.verdict"
        low, high = self.low, self.high
        if (low is None) != (high is None) or (low is not None and high is not None and not low < high):
            raise UserError(
                f"{key}.low={low} and {key}.high={high} are no scale: give two numbers, low below high, or neither"
            )
        for name, reward in self.rewards.items():
            require(
                bool(name.strip()) and math.isfinite(reward),
                f"{key}.choices",
                self.choices,
                "names with finite rewards",
            )
        if self.pattern is not None:
            if self.kind == "json":
                raise UserError(
                    f"{key}.pattern is set, but {key}.kind=json reads no pattern: set {key}.kind=number or choice"
                )
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise UserError(
                    f"{key}.pattern={self.pattern} is no regular expression ({error}): correct it"
                ) from error

    @property
    def rewards(self) -> dict[str, float]:
        """Reward by choice."""
        return self.choices or AB


@dataclass
class JudgeRewardConfig(HttpSourceConfig):
    """A language model behind an OpenAI-compatible endpoint. It reads a rubric with prompt and response.

    Each verdict is requested once and kept on disk under the digest of the request: model, sampling settings, rubric and texts.
    """

    section: ClassVar[str] = "reward.judge"
    called: ClassVar[str] = "judge"

    model: str | None = None
    """The model's name at the endpoint."""
    rubric: str | None = None
    """The question, a text or @file, in which {prompt}, {response}, {turns} and {label} are replaced. It must hold {response}, or
    {turns}: an episode's responses with the environment's messages in between."""
    verdict: VerdictConfig = field(default_factory=VerdictConfig)
    temperature: float | None = setting(0.0, ge=0, expected="a number from 0 up, or null")
    """null leaves it to the endpoint, as for max_tokens and seed."""
    max_tokens: int | None = setting(512, gt=0, expected="a number above 0, or null")
    """Maximum length of the judge's answer; null leaves it to the endpoint."""
    seed: int | None = 0
    """Seed sent with each request; null sends none."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further keys of requests, e.g. {structured_outputs: {choice: [A, B]}} for vLLM, {max_completion_tokens: 512} for OpenAI."""
    token: TokenConfig = field(default_factory=lambda: TokenConfig(token_env="NSR_JUDGE_TOKEN"))
    """The endpoint's API key."""
    concurrency: int = setting(16, gt=0, expected="a number above 0")
    """Maximum number of requests at a time to each server."""
    cache_dir: str | None = None
    """Folder of the verdicts. Several runs may share it; null is <run.output_dir>/verdicts."""

    def validate(self) -> None:
        """Replace the rubric by the text of its file, so that it becomes part of the configuration."""
        for url in self.urls:
            if "?" in url or "#" in url:
                raise UserError(
                    "reward.judge.urls holds an address with a query or a fragment, after ? or #: give the address alone, and "
                    "a key as reward.judge.token.token_file"
                )
            if "@" in url.partition("://")[2].partition("/")[0]:
                raise UserError(
                    "reward.judge.urls holds a user or password: give the key as reward.judge.token.token_file"
                )
        super().validate()
        if self.weight != 0 and (self.model is None or self.rubric is None):
            missing = "model" if self.model is None else "rubric"
            raise UserError(f"reward.judge.weight={self.weight} needs a {missing}: set reward.judge.{missing}")
        if self.rubric is not None:
            self.rubric = rubric_text(self.rubric)
            self._validate_rubric(self.rubric)
        if taken := [name for name in OWN_KEYS if name in self.extra_body]:
            raise UserError(f"reward.judge.extra_body sets {taken[0]}, which the judge sets itself: take it out")

    @property
    def needs_label(self) -> bool:
        return self.rubric is not None and LABEL in self.rubric

    @staticmethod
    def _validate_rubric(rubric: str) -> None:
        if "{response}" not in rubric and "{turns}" not in rubric:
            raise UserError(
                "reward.judge.rubric holds neither {response} nor {turns}: put one where the judge is to read the response"
            )
        for word in re.findall(r"\{\w+\}", rubric):
            meant = difflib.get_close_matches(word, RUBRIC_PLACEHOLDERS, n=1, cutoff=0.8)
            if meant and word not in RUBRIC_PLACEHOLDERS:
                raise UserError(f"reward.judge.rubric holds {word}, did you mean {meant[0]}? Rename it")
