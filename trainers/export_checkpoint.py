"""Turn a checkpoint into a Hugging Face directory: python trainers/export_checkpoint.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import export_checkpoint

if __name__ == "__main__":
    export_checkpoint()
