"""Where the token comes from and that it does not stay there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.wire.secret import own_token, read_token


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TokenConfig(token_env="SOME_TOKEN")
    assert read_token(config) is None
    monkeypatch.setenv("SOME_TOKEN", "from the environment")
    assert read_token(config) == "from the environment"
    (tmp_path / "token").write_text("from the file\n")
    config.token_file = str(tmp_path / "token")
    assert read_token(config) == "from the file"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match="holds no usable token"):
        read_token(config)
    config.token_file = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="does not exist"):
        read_token(config)


def test_the_token_leaves_the_environment_that_the_kernel_shows() -> None:
    """/proc/PID/environ shows what a process was started with, whatever it has unset since."""
    program = """if True:
        from pathlib import Path
        from nemo_style_rlhf.wire.secret import read_token
        from nemo_style_rlhf.schema.common import TokenConfig
        shown = lambda: Path("/proc/self/environ").read_bytes()
        assert b"SOME_TOKEN=s3cret" in shown() and b"BESIDE=it" in shown()
        assert read_token(TokenConfig(token_env="SOME_TOKEN")) == "s3cret"
        assert read_token(TokenConfig(token_env="SOME_TOKEN")) == "s3cret"
        assert b"s3cret" not in shown() and b"BESIDE=it" in shown()
    """
    environment = {**os.environ, "SOME_TOKEN": "s3cret", "BESIDE": "it"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_a_home_that_cannot_be_searched_is_one_sentence(monkeypatch):
    """As where HOME is another user's: a name that is too long is refused to every user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 300)
    with pytest.raises(UserError, match=r"your servers would be, cannot be read \(File name too long\): set HOME"):
        own_token()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    assert own_token() is None
