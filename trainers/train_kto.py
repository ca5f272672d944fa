"""KTO on judged responses: python trainers/train_kto.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python without the package installed

import nemo_style_rlhf  # noqa: F401  sets up OpenMP

if __name__ == "__main__":  # processes that multiprocessing starts import this script, too, but must not run it
    from nemo_style_rlhf.programs import train_kto

    train_kto()
