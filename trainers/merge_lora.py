"""Merge a LoRA adapter into its base model: python trainers/merge_lora.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import merge_lora

if __name__ == "__main__":
    merge_lora()
