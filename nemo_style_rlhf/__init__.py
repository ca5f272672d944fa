"""PPO for Hugging Face language models in two processes that speak only HTTP."""

import os

# libgomp reads this once, when torch loads it, so the package sets it before anything else. The two processes share the
# cores of a CPU machine by design, and threads that wait by spinning starve whoever has work: 2.5 times the CPU seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
