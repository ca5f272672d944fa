"""A critic server that is met last, when everything else has loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo.critic import meet_critic_last
from nemo_style_rlhf.schema.actor import PPOActorConfig


@pytest.mark.parametrize("longest", [40, 39])
def test_what_has_loaded_is_closed_if_the_server_does_not_fit(tmp_path: Path, longest: int) -> None:
    """It takes sequences of at most ``longest`` tokens, and the run may make 40."""
    status = SimpleNamespace(roles=["critic"], max_length=longest, templates={})
    critic: Any = SimpleNamespace(
        wait_until_ready=lambda *_: status, handshake=lambda **_: status, address="here", where="the server"
    )
    config = PPOActorConfig()
    config.reward.critic.weight = 0
    start: Any = SimpleNamespace(
        config=config, store=CheckpointStore(tmp_path, 2), tokenizer=SimpleNamespace(get_vocab=dict, encode=list)
    )
    policy: Any = SimpleNamespace(vocabulary=64, max_length=40)
    closed: list[str] = []
    loaded: list[Any] = [
        SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("generator", "judge")
    ]
    if longest >= 40:
        meet_critic_last(critic, start, policy, Ranks(), [*loaded, None])
        assert closed == []
        return
    with pytest.raises(UserError, match=r"may reach 40 tokens but the critic server takes at most 39: lower"):
        meet_critic_last(critic, start, policy, Ranks(), [*loaded, None])
    assert closed == ["generator", "judge"]
