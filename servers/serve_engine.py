"""A generation engine: python servers/serve_engine.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import serve_engine

if __name__ == "__main__":
    serve_engine()
