"""The old name of a key is refused, and the refusal names the new one."""

import re

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.usage import describe_keys
from nemo_style_rlhf.schema.base import build, keys
from nemo_style_rlhf.schema.programs import PROGRAMS
from nemo_style_rlhf.schema.renamed import RENAMED, hint
from tests.support.paths import ROOT

CASES = [
    (script, section + old, section + new)
    for script, (_, schema) in PROGRAMS.items()
    for section in ("", "critic.")
    for old, new in RENAMED.items()
    if section + new in set(keys(schema))
]


@pytest.mark.parametrize(("script", "old", "new"), CASES, ids=str)
def test_an_old_name_is_refused_with_the_new_one(script: str, old: str, new: str) -> None:
    _, schema = PROGRAMS[script]
    assert old not in set(keys(schema))
    assert hint(old, list(keys(schema))) == f"it was renamed, use {new}"
    with pytest.raises(UserError, match=rf"renamed, use (.*, )?{re.escape(new)}(,|$)"):
        build(schema, OmegaConf.from_dotlist([f"{old}=1"]))
    with pytest.raises(UserError, match=rf"^--help {re.escape(old)}: it was renamed, use {re.escape(new)}$"):
        describe_keys(script, [old])


@pytest.mark.parametrize("old", RENAMED)
def test_every_row_is_a_key_of_a_program_and_of_the_documentation(old: str) -> None:
    assert {script for script, name, _ in CASES if name == old} == {"serve_ppo_critic"}
    assert {script for script, name, _ in CASES if name == f"critic.{old}"} == {
        "train_ppo_local",
        "train_ppo_ray",
        "plan",
    }
    assert f"| `{old}` (critic server) | `{RENAMED[old]}` |\n" in (ROOT / "docs" / "migrating.md").read_text()


def test_other_keys_have_no_new_name() -> None:
    for _, schema in PROGRAMS.values():
        assert all(hint(key, list(keys(schema))) == "" for key in keys(schema))
