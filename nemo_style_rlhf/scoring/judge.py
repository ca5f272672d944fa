"""A language model as judge: asks it through the OpenAI API what each response is worth."""

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from requests import PreparedRequest
from requests.auth import AuthBase

from nemo_style_rlhf.schema.judge import LABEL, ROUTE, RUBRIC_PLACEHOLDERS, JudgeRewardConfig
from nemo_style_rlhf.scoring.combined import stacked
from nemo_style_rlhf.scoring.futures import caught, gathered, mapped
from nemo_style_rlhf.scoring.http import HttpServers
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample, quoted
from nemo_style_rlhf.scoring.verdict_store import JudgesAnswer, VerdictStore
from nemo_style_rlhf.scoring.verdicts import Unreadable, read_verdict
from nemo_style_rlhf.wire.secret import read_token

REFUSALS = frozenset(range(400, 500)) - {408, 409, 425, 429}
"""A request too long, a wrong key or a wrong model, but not a busy server."""
PLACEHOLDER = re.compile("|".join(map(re.escape, RUBRIC_PLACEHOLDERS)))


class Bearer(AuthBase):
    """The API key, if there is one. As an ``AuthBase`` it keeps `requests` from sending a password of ~/.netrc instead."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class JudgeScorer:
    """Asks for one verdict for each sample. Equal requests are made once, also with those under way and of earlier runs."""

    def __init__(self, config: JudgeRewardConfig, verdicts: Path, *, rank: int = 0) -> None:
        """Read the API key, and make the folder of the verdicts.

        Args:
            verdicts: folder of the verdicts if the configuration names none.

        Raises:
            UserError: the key cannot be read, or the folder cannot be made.
        """
        self._config = config
        self._store = VerdictStore(Path(config.cache_dir or verdicts))
        self._servers = HttpServers(
            config, rank=rank, route=ROUTE, auth=Bearer(read_token(config.token)), refusals=REFUSALS
        )
        self._pool = ThreadPoolExecutor(config.concurrency * len(config.urls), thread_name_prefix="judge")
        self._asking: dict[str, Future[JudgesAnswer]] = {}
        self._lock = threading.RLock()

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        return gathered([caught(self._judged(sample), RewardError) for sample in samples], stacked)

    def close(self) -> None:
        self._servers.close()
        self._pool.shutdown(cancel_futures=True)

    def _judged(self, sample: ScoringSample) -> "Future[Scores]":
        if sample.label is None and self._config.needs_label:
            refused: Future[Scores] = Future()
            refused.set_exception(
                RewardError(f"reward.judge.rubric holds {LABEL}, but a row has none: set data.label_key")
            )
            return refused
        return mapped(self._answer(request(self._config, sample)), self._scores)

    def _answer(self, body: dict[str, Any]) -> "Future[JudgesAnswer]":
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        with self._lock:
            if (asked := self._asking.get(key)) is None:
                ask = partial(self._servers.ask, body, _completion)
                asked = self._pool.submit(self._store.once, key, ask, self._servers.closing.is_set)
                self._asking[key] = asked
                asked.add_done_callback(lambda _: self._forget(key))
        return asked

    def _forget(self, key: str) -> None:
        with self._lock:
            self._asking.pop(key, None)

    def _scores(self, answer: JudgesAnswer) -> Scores:
        try:
            return Scores(rewards=torch.tensor([read_verdict(answer.text, self._config.verdict)], dtype=torch.float32))
        except Unreadable as error:
            cut = ", cut at reward.judge.max_tokens" if answer.finish_reason == "length" else ""
            raise RewardError(
                f"the judge {self._config.model} answered {quoted(answer.text)}{cut}, {error}: correct reward.judge.rubric "
                "or reward.judge.verdict"
            ) from error


def request(config: JudgeRewardConfig, sample: ScoringSample) -> dict[str, Any]:
    """The body of the request for one verdict. Placeholders within the inserted texts stay as they are."""
    assert config.rubric is not None  # JudgeRewardConfig.validate
    turns = "\n\n".join(f"[{turn['role']}]\n{turn['content']}" for turn in sample.turns)
    texts = {
        "{prompt}": sample.prompt, "{response}": sample.response, "{turns}": turns, LABEL: sample.label or "",
    }  # fmt: skip
    question = PLACEHOLDER.sub(lambda found: texts[found.group()], config.rubric)
    settings = {"temperature": config.temperature, "max_tokens": config.max_tokens, "seed": config.seed}
    return {
        "model": config.model,
        "messages": [{"role": "user", "content": question}],
        **{name: value for name, value in settings.items() if value is not None},
        **config.extra_body,
    }


def _completion(answer: object, source: str) -> JudgesAnswer:
    """The text of a chat completion, and why it ended.

    Raises:
        RewardError: the answer is not a chat completion, or has no text although it was not cut.
    """
    try:
        choice = answer["choices"][0]  # type: ignore[index]
        text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError) as error:
        raise RewardError(
            f"{source} answered {quoted(answer)}, expected a chat completion: correct its address"
        ) from error
    if not isinstance(text, str) or not isinstance(reason, str | None):
        raise RewardError(
            f"{source} answered {quoted(text)} as its message's content, expected a text: correct the endpoint"
        )
    if not text.strip() and reason != "length":
        raise RewardError(
            f"{source} answered with an empty message (finish_reason {reason}), expected a verdict: look at its log"
        )
    return JudgesAnswer(text, reason)
