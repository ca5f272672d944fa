"""Memory of log-probabilities with entropy at a vocabulary of 128k, beside the one tensor that is never made.

    .venv-actor/bin/python benchmarks/logprobs_memory.py

Forward and backward of 32 x 512 tokens; prints the peak above inputs and gradients as a share of [batch, time, vocabulary]
logits in fp32.
"""

import argparse
import resource
import threading
import time

import psutil
import torch

from nemo_style_rlhf.models.logprobs import token_logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--time", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=128 * 1024)
    parser.add_argument("--hidden", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = torch.randn(arguments.batch, arguments.time, arguments.hidden, device=device, requires_grad=True)
    weight = torch.randn(arguments.vocabulary, arguments.hidden, device=device, requires_grad=True)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    ids = torch.randint(arguments.vocabulary, (arguments.batch, arguments.time), device=device)
    meter = Meter(device)
    began = time.perf_counter()
    logprobs, entropy = token_logprobs(hidden, weight, ids, with_entropy=True)
    (logprobs + 0.01 * entropy).mean().backward()
    seconds = time.perf_counter() - began
    peak = meter.stop()
    logits = arguments.batch * arguments.time * arguments.vocabulary * 4
    print(
        f"{arguments.batch} x {arguments.time} tokens, vocabulary {arguments.vocabulary:,}, {device.type}: peak "
        f"{peak / 2**30:.2f} GiB above the inputs, {peak / logits:.3f} of the "
        f"{logits / 2**30:.1f} GiB of fp32 logits; {seconds:.1f} s"
    )


class Meter:
    """Measures the peak memory since its creation, above the memory held at that moment."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._peak = 0
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._running = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while self._running:
            self._peak = max(self._peak, self._process.memory_info().rss)
            time.sleep(0.005)

    def stop(self) -> int:
        if self._cuda:
            return torch.cuda.max_memory_allocated() - self._before
        self._running = False
        self._thread.join()
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # includes peaks between two samples
        return max(self._peak, highest) - self._before


if __name__ == "__main__":
    main()
