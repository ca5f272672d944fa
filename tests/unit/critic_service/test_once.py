"""A copy of a request changes nothing, however late it comes."""

import json

import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.once import REMEMBERED, once
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import ProtocolError


class Trainer:
    """An endpoint that a request changes: it counts them."""

    def __init__(self) -> None:
        self.changes = 0
        self._endpoint = once(protocol.CommitRequest, self._change)

    def _change(self, request: protocol.CommitRequest) -> dict[str, object]:
        self.changes += 1
        return {"changes": self.changes}

    def ask(self, request_id: str | None, keep: int = 1) -> int:
        content = {"lease": "L", "checkpoint_id": "run-step_000001", "keep": keep, "request_id": request_id}
        answer = self._endpoint({messages.REQUEST.name: messages.json_tensor(content)})
        return int(json.loads(answer[messages.RESPONSE.name].item(0))["changes"])


def test_a_copy_of_a_request_gets_the_first_answer_whatever_came_between() -> None:
    trainer = Trainer()
    assert [trainer.ask(name) for name in ("a", "b", "a", "b", "a")] == [1, 2, 1, 2, 1]
    assert trainer.changes == 2


def test_requests_without_an_id_are_told_apart_by_nothing() -> None:
    trainer = Trainer()
    assert [trainer.ask(None), trainer.ask(None)] == [1, 2]


def test_an_id_belongs_to_one_request() -> None:
    trainer = Trainer()
    trainer.ask("a")
    with pytest.raises(ProtocolError, match="request_id a was used before, with other content"):
        trainer.ask("a", keep=2)
    assert trainer.changes == 1


def test_the_oldest_answers_are_forgotten() -> None:
    trainer = Trainer()
    for number in range(REMEMBERED + 1):
        trainer.ask(f"{number}")
    assert trainer.ask("1") == 2
    assert trainer.ask("0") == REMEMBERED + 2
