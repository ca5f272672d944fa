"""Rule 6: bad input gets a clear answer and changes nothing. The sentences; test_fuzz.py has the rest."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.wire.messages import ProtocolError
from tests.fuzz.fuzzer import (
    MAX_REQUEST_BYTES,
    TOKEN,
    post,
    tensor,
    text,
    valid_infer,
    valid_reward,
    valid_train,
)
from tests.fuzz.kserve_faults import as_json, send_json
from tests.support.critic_server import TOKEN_ENV, CriticServer


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory, reward_model, backend: str) -> Iterator[CriticServer]:
    """A server with a token and a small body limit."""
    server = CriticServer(
        tmp_path_factory.mktemp("guarded_server"),
        reward_model,
        [f"server.max_request_bytes={MAX_REQUEST_BYTES}"],
        {TOKEN_ENV: TOKEN},
        backend=backend,
    ).start()
    yield server
    server.close()


@pytest.fixture
def critic(guarded_server: CriticServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteCritic]:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    with guarded_server.client() as client:
        yield client


@pytest.mark.parametrize("token", [2**31, 2**32 + 5, -(2**31) - 1, -(2**63), 2**63, 2**64, 10**400])
def test_an_integer_that_does_not_fit_is_refused_and_not_wrapped(guarded_server: CriticServer, token: int) -> None:
    """NumPy 1 makes 5 of 2**32 + 5, which is a token."""
    raw = valid_infer()
    content = as_json(raw)
    content["inputs"][0]["data"][0] = token
    send_json(raw, json.dumps(content).encode())
    response = post(guarded_server, raw)
    assert response.json() == {"error": "[invalid] tokens holds data that does not fit into INT32"}


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"tokens": tensor(np.array([5, 6, 7, 64]), "INT32")},
            "[invalid] tokens[3] is 64, outside the vocabulary 0..63",
        ),
        (
            {"sequence_lengths": tensor(np.array([1, 2]), "INT32")},
            "[invalid] sequence_lengths add up to 3 but tokens has 4",
        ),
        (
            {"sequence_lengths": tensor(np.array([0, 4]), "INT32")},
            "[invalid] sequence_lengths[0] is 0, expected 1..128",
        ),
        ({"sequence_lengths": tensor(np.array([]), "INT32")}, "[invalid] sequence_lengths is empty"),
        ({"tokens": tensor(np.array([5, 6, 7, 8]), "INT64")}, "[invalid] tokens is INT64, expected INT32"),
        ({"tokens": tensor(np.array([[5, 6, 7, 8]]), "INT32")}, "[invalid] tokens has shape [1, 4], expected [N]"),
        ({"returns": tensor(np.array([0, np.nan, 0, 0]), "FP32")}, "[invalid] returns[1] is NaN or infinite"),
        ({"mask": tensor(np.array([0, 1, 1, 1]), "FP32")}, "[invalid] mask is 1 at the last token of sequence 1"),
        ({"mask": tensor(np.array([0, 0, 0, 0]), "FP32")}, "[invalid] plan.digest does not fit"),
        (
            {"tokens": tensor(np.full(20000, 3), "INT32")},
            "[invalid] the request has 80056 bytes of tensors, expected at most",
        ),
        ({"plan": text("{")}, "[invalid] plan is not valid JSON"),
    ],
)
def test_rule_6_the_answer_names_the_tensor_and_the_rule(
    guarded_server: CriticServer, critic: RemoteCritic, change: dict, sentence: str
) -> None:
    raw = valid_train(critic._require_lease(), critic.status().critic_step + 1)
    raw.tensors |= change
    response = post(guarded_server, raw)
    assert response.status_code == 400
    assert sentence in response.json()["error"]


@pytest.mark.parametrize(
    "request_json, sentence",
    [
        ("{}", "[invalid] request.want is missing"),
        ('{"want": "reward"}', '[invalid] request.want is "reward", expected rewards, values or both'),
        ('{"want": ["values"]}', '[invalid] request.want is ["values"], expected rewards, values or both'),
        ('{"want": null}', "[invalid] request.want is null, expected rewards, values or both"),
        (
            '{"want": "both", "expect_critic_step": -1}',
            "request.expect_critic_step is -1, expected a number from 0 up, or",
        ),
        (
            '{"want": "both", "expect_critic_step": true}',
            "request.expect_critic_step is true, expected a number from 0",
        ),
        (
            '{"want": "both", "step": 1}',
            "[invalid] request has the unknown field 'step', expected want, expect_critic_st",
        ),
        ("[]", "[invalid] request is not a JSON object"),
    ],
)
def test_rule_6_an_infer_request_says_what_it_wants(
    guarded_server: CriticServer, request_json: str, sentence: str
) -> None:
    raw = valid_infer()
    raw.tensors["request"] = text(request_json)
    response = post(guarded_server, raw)
    assert response.status_code == 400
    assert sentence in response.json()["error"]


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"prompts": text(), "responses": text()}, "[invalid] prompts is empty"),
        ({"responses": text()}, "[invalid] responses is empty"),
        ({"responses": text("w4")}, "[invalid] responses has 1 entries but prompts has 2"),
        ({"prompts": text("w1", b"w3 \xff")}, "[invalid] prompts[1] is not valid UTF-8 at byte 3"),
        ({"responses": text(b"\xed\xa0\x80", "w5")}, "[invalid] responses[0] is not valid UTF-8 at byte 0"),
        (
            {"responses": text("w4", "w5 " * 127)},
            "[invalid] prompts[1] and responses[1] make a sequence of 129 tokens, expected 1..128",
        ),
        (
            {"responses": text("w4", b"w" * MAX_REQUEST_BYTES)},
            f"[invalid] the request has {MAX_REQUEST_BYTES + 25} bytes of tensors, expected at most {MAX_REQUEST_BYTES}",
        ),
        ({"prompts": tensor(np.array([1, 2]), "INT32")}, "[invalid] prompts is INT32, expected BYTES"),
        ({"conversations": tensor(np.array([2]), "INT32")}, "[invalid] conversations is 2, expected 0 or 1"),
    ],
)
def test_rule_6_the_answer_names_the_text_and_the_rule(
    guarded_server: CriticServer, change: dict, sentence: str
) -> None:
    raw = valid_reward()
    raw.tensors |= change
    response = post(guarded_server, raw)
    assert response.status_code == 400
    assert sentence in response.json()["error"]


def test_rule_6_a_step_that_would_learn_nothing_is_refused(guarded_server: CriticServer, critic: RemoteCritic) -> None:
    from dataclasses import replace

    from tests.support.critic_server import train_batch

    batch = train_batch(1)
    empty = replace(batch, masks=[np.zeros_like(mask) for mask in batch.masks], normalizers=[1.0, 1.0])
    step = critic.status().critic_step + 1
    with pytest.raises(ProtocolError, match="would learn nothing"):
        critic.train(empty, step=step).result()
    assert critic.status().critic_step == step - 1
