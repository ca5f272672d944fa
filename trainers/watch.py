"""A page of runs in your browser, while they train and afterwards: python trainers/watch.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import watch

if __name__ == "__main__":
    watch()
