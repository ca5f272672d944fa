"""The commands that a page of the documentation shows."""

import re
from pathlib import Path


def commands(page: Path) -> list[str]:
    """The commands of a page's ```bash blocks, continuation lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
