"""What a server keeps in the shared memory of its host."""

import subprocess

import pytest

from tests.support.paths import ROOT, SERVER_PYTHON

UNSHARE = ["unshare", "--map-root-user", "--mount"]
CODE = "from nemo_style_rlhf.critic_service.runtime_files import require_room; require_room()"


@pytest.mark.parametrize(
    ("size", "sentence"), [("1m", "/dev/shm has 1 MiB free and Triton needs 11 to start: "), ("64m", "")]
)
def test_shared_memory_in_which_triton_could_not_start_is_refused_before_it_starts(size, sentence):
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {SERVER_PYTHON} -c "{CODE}"'
    done = subprocess.run([*UNSHARE, "sh", "-c", mount], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, sentence in done.stderr) == (int(bool(sentence)), True), done.stderr
