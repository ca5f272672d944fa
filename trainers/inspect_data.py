"""Show tokenized training samples: python trainers/inspect_data.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import inspect_data

if __name__ == "__main__":
    inspect_data()
