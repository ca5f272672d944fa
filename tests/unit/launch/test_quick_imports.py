"""A quick import finds what a plain one finds."""

import importlib.metadata
import subprocess
import sys

import pytest

from nemo_style_rlhf.launch.quick_imports import packages_distributions

STRUCTURE = """
import hashlib, sys
if sys.argv[1] == "quick":
    from nemo_style_rlhf.launch.quick_imports import make_imports_quick
    make_imports_quick()
    make_imports_quick()
import transformers
from transformers.utils import import_utils
import transformers.models
for module in (transformers, transformers.models):
    known = sorted((name, sorted(names)) for name, names in module._import_structure.items())
    print(len(known), hashlib.sha256(repr(known).encode()).hexdigest())
print(sorted((name, sorted(found)) for name, found in import_utils.PACKAGE_DISTRIBUTION_MAPPING.items()))
print(import_utils.create_import_structure_from_path.__module__, file=sys.stderr)
"""


def test_the_packages_are_those_of_the_standard_library() -> None:
    ours, theirs = packages_distributions(), importlib.metadata.packages_distributions()
    assert {name: sorted(found) for name, found in ours.items()} == {
        name: sorted(found) for name, found in theirs.items()
    }


@pytest.mark.slow("starts processes that import transformers")
def test_transformers_knows_the_same_names() -> None:
    quick, plain = (
        subprocess.run([sys.executable, "-c", STRUCTURE, how], capture_output=True, text=True, check=True)
        for how in ("quick", "plain")
    )
    assert quick.stdout == plain.stdout
    assert "quick_imports" in quick.stderr and "quick_imports" not in plain.stderr


def test_a_model_is_taken_from_its_wrappers_without_deepspeed() -> None:
    """Unless DeepSpeed is loaded, when the model may be in one of its engines."""
    program = (
        "import sys\n"
        "from nemo_style_rlhf.launch.quick_imports import make_imports_quick\n"
        "make_imports_quick()\n"
        "from accelerate.utils.other import extract_model_from_parallel\n"
        "from torch import nn\n"
        "model = nn.Linear(2, 2)\n"
        "assert extract_model_from_parallel(model) is model and 'deepspeed' not in sys.modules\n"
        "import deepspeed\n"
        "engine = deepspeed.DeepSpeedEngine.__new__(deepspeed.DeepSpeedEngine)\n"
        "nn.Module.__init__(engine)\n"
        "engine.module = model\n"
        "assert extract_model_from_parallel(engine) is model\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
