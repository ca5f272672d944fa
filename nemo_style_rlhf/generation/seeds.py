"""The seed of each sample."""

import hashlib

from nemo_style_rlhf.generation.interface import SampleId


def sample_seed(run_seed: int, sample: SampleId) -> int:
    """A 31-bit seed, a pure function of the run's seed and the sample's identity, independent of engines, ranks and order."""
    key = f"{run_seed}/{sample.step}/{sample.prompt_id}/{sample.index}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1
