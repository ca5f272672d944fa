"""Slow reward functions for benchmarks/async_cycle.py. They sleep: a service elsewhere costs time here, and no work."""

import hashlib
import math
import time

LATENCY_S = 2.0
MEDIAN_S, LONGEST_S = 0.2, 4.0


def latency(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """Every call takes the same time."""
    time.sleep(LATENCY_S)
    return [float(len(set(query.split()))) for query in queries]


def long_tail(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """As episodes with an environment: a log-normal time for each sample, which only its text decides."""
    for query in queries:
        first, second = (int.from_bytes(hashlib.sha256(f"{n}{query}".encode()).digest()[:4]) / 2**32 for n in (1, 2))
        normal = math.sqrt(-2 * math.log(first + 1e-9)) * math.cos(2 * math.pi * second)  # Box and Muller
        time.sleep(min(LONGEST_S, MEDIAN_S * math.exp(normal)))
    return [float(len(set(query.split()))) for query in queries]
