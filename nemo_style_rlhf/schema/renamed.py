"""Keys that have a new name. A program refuses the old name, and names the new one."""

from collections.abc import Collection

RENAMED = {
    "critic.enabled": "value_model.enabled",
    "critic.path": "value_model.path",
    "critic.loss_clip_val": "value_model.loss_clip_val",
    "critic.combine_rm_and_critic_server": "reward_model.combine_rm_and_critic_server",
    "critic.label_weights": "reward_model.label_weights",
    "critic.append_eos": "reward_model.append_eos",
    "critic.normalize_rewards": "reward_model.normalize_rewards",
    "critic.offload_reward_model": "reward_model.offload_reward_model",
    "critic.max_length": "server.max_length",
    "critic.max_staged_bytes": "server.max_staged_bytes",
}
"""New name by old name. A program of both processes takes the critic server's with ``critic.`` before them."""


def new_names(key: str, known: Collection[str]) -> list[str]:
    """The new names of ``key``, or of the keys of a section of that name.

    Args:
        known: the keys that the program has.
    """
    rows = [(section + old, section + new) for section in ("", "critic.") for old, new in RENAMED.items()]
    return [new for old, new in rows if f"{old}.".startswith(f"{key}.") and new in known]


def hint(key: str, known: Collection[str]) -> str:
    """A sentence for the refusal of ``key`` that names its new name; empty if it has none."""
    found = new_names(key, known)
    if len(found) > 1:
        return f"its keys were renamed, use {', '.join(found)}"
    return f"it was renamed, use {found[0]}" if found else ""
