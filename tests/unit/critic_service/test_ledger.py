"""Leases, each train step once, and each change once: a copy of its request changes nothing, however late it comes."""

import json

import pytest

from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.ledger import REMEMBERED, Ledger, once
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from tests.unit.critic_service.batches import LIMITS, train_inputs


def test_the_ledger_counts_every_step_once() -> None:
    ledger = Ledger(max_staged_bytes=2**30)
    lease = ledger.acquire("run")
    one, two = (validation.read_train(train_inputs(lease, 1, part, 2), LIMITS) for part in (1, 2))
    assert ledger.stage(one) == ({"staged": 1, "parts": 2}, None)
    complete = ledger.stage(two)[1]
    assert complete is not None
    assert [part.part for part in complete] == [1, 2]
    ledger.applied([one, two], {"answer": 1})
    assert ledger.stage(two) == ({"answer": 1}, None)
    assert ledger.step == 1
    with pytest.raises(ProtocolError, match="train step 3 does not follow: the critic is at step 1"):
        ledger.stage(validation.read_train(train_inputs(lease, 3), LIMITS))


def test_the_ledger_takes_so_many_bytes_of_a_step() -> None:
    """A part here has 88: 5 tokens of 16 and 2 sequences of 4. One that is sent again counts once."""
    ledger = Ledger(max_staged_bytes=2 * 88)
    lease = ledger.acquire("run")
    parts = [validation.read_train(train_inputs(lease, 1, part, 3), LIMITS) for part in (1, 2, 3)]
    for part in (parts[0], parts[1], parts[1]):
        ledger.stage(part)
    with pytest.raises(
        ProtocolError, match=r"step 1 comes to 264 bytes .* server.max_staged_bytes is 176: "
    ) as refusal:
        ledger.stage(parts[2])
    assert refusal.value.code is Code.INVALID
    ledger.drop()
    assert ledger.stage(parts[2]) == ({"staged": 1, "parts": 3}, None)


def test_a_lease_is_for_the_checkpoints_of_its_run() -> None:
    ledger = Ledger(max_staged_bytes=2**30)
    lease = ledger.acquire("mine")
    ledger.check_run(lease, "mine-step_000001")
    with pytest.raises(ProtocolError, match=r"^\[conflict\] checkpoint theirs-step_000001 is of the run theirs"):
        ledger.check_run(lease, "theirs-step_000001")
    with pytest.raises(ProtocolError, match=r"^\[lease_lost\]"):
        ledger.check_run("another", "mine-step_000001")


def test_an_answer_of_a_lost_lease_is_nobodys() -> None:
    """The step ran while the lease was lost: it counts, but the new holder does not get the old one's answer."""
    ledger = Ledger(max_staged_bytes=2**30)
    old = ledger.acquire("old")
    part = validation.read_train(train_inputs(old), LIMITS)
    ledger.stage(part)
    new = ledger.acquire("new")
    ledger.applied([part], {"answer": 1})
    with pytest.raises(ProtocolError, match="does not follow: the critic is at step 1"):
        ledger.stage(validation.read_train(train_inputs(new), LIMITS))
    with pytest.raises(ProtocolError, match="run 'new' holds it now"):
        ledger.check(old)


# --- copies of requests ----------------------------------------------------------------------------------------------


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
