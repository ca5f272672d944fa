"""PPO for Hugging Face language models in two processes that speak only HTTP."""

import os

# libgomp reads this once, when torch loads it, so the package sets it before anything else. The two processes share the
# cores of a CPU machine by design: threads that wait by spinning starve those with work (2.5 times the CPU seconds), and threads
# that sleep at once wake up late between the small operations of a decoding step (1.3 times its time). So threads spin for a few
# microseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
