"""Nothing in this folder may run without a sandbox: its programs kill processes, mount file systems and delete files."""

from collections.abc import Iterator

import pytest

from nemo_style_rlhf.scoring import sandbox


@pytest.fixture(scope="session", autouse=True)
def _only_in_a_sandbox(_judge_code_anyway: None) -> Iterator[None]:
    """pytest collects a folder that is given by name even where tests/conftest.py leaves it out."""
    if why := sandbox.why_no_sandbox():
        pytest.exit(f"tests/unit/scoring/sandbox would attack this machine, which has no sandbox: {why}", returncode=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(sandbox.WITHOUT)
        sandbox.require_sandbox.cache_clear()
        yield
    sandbox.require_sandbox.cache_clear()
