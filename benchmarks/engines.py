"""One generation engine beside vLLM in this process: samples per second, and seconds until new weights can sample.

    .venv-actor/bin/python benchmarks/engines.py

The engine is a process of its own that an ``EnginePool`` asks, as a run does; the generator in this process is built by the same
code, with the same threads. The two sample the same requests in turn, and must return the same tokens. Publishing and loading,
which digests and a probe verify, takes turns with a bare ``reload_weights`` in this process, for the same tensors. While one
side works, the other waits: the last line says how many CPU seconds that took.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path

import psutil
from bare import alternate, read_prompts, reload_weights, requests_of
from ppo_step import DTYPES, make_models, models_dir
from processes import ROOT
from report import median, table

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.engines.factory import make_engine_pool, make_weight_store
from nemo_style_rlhf.generation.factory import make_generator
from nemo_style_rlhf.generation.interface import GenerationRequest, SampleId, Stream
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.launch.malloc import THREAD_CACHES_OFF, TUNABLES
from nemo_style_rlhf.models.loading import load_causal_lm, load_tokenizer
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.sampler_check import MAX_GAP, Probe
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import EnginesConfig, TrainingGenerationConfig

OURS, ENGINE = "this process", "engine"
LEAST_SPEED = 0.95
"""An engine's samples per second as a share of the generator's in this process: at least this."""
LONGEST_LOAD = 3
"""Seconds of publishing and loading as a multiple of a bare ``reload_weights``: at most this."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m", help="see benchmarks/models.py")
    parser.add_argument("--dtype", choices=sorted(MAX_GAP), default="float32")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="of sampling, after one that does not count")
    parser.add_argument("--loads", type=int, default=20, help="rounds of new weights, after one that does not count")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of both processes")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    if TUNABLES not in os.environ:  # the engine's malloc, and a trainer's, see launch/malloc.py
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {TUNABLES: THREAD_CACHES_OFF})
    make_models(arguments)
    sampling, waited, loading = measure(arguments)
    speeds = {name: arguments.samples / seconds for name, seconds in sampling.items()}
    print(f"{arguments.model}, {arguments.dtype}, {arguments.samples} samples x {arguments.response_length} tokens, "
          f"{arguments.threads} threads; medians of {arguments.rounds} and {arguments.loads} rounds\n")  # fmt: skip
    header = ["", "in this process", "one engine", "engine / this process", "wanted"]
    rows = [
        ["samples/s", f"{speeds[OURS]:.1f}", f"{speeds[ENGINE]:.1f}", f"{speeds[ENGINE] / speeds[OURS]:.3f}",
         f"at least {LEAST_SPEED}"],
        ["new weights, s (here: bare `reload_weights`)", f"{loading[OURS]:.3f}", f"{loading[ENGINE]:.3f}",
         f"{loading[ENGINE] / loading[OURS]:.2f}", f"at most {LONGEST_LOAD}"],
    ]  # fmt: skip
    print(table(header, rows))
    print(
        f"\nCPU seconds of the side that waited: the engine {waited[OURS]:.2f}, this process {waited[ENGINE]:.2f}, the engine's "
        "client included"
    )
    os._exit(0)  # vLLM's engine would take seconds to end


def measure(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Median seconds of sampling by side, CPU seconds that the other side used meanwhile, and seconds of new weights."""
    run = RunConfig(str(arguments.work_dir / "run_engines"), num_threads=arguments.threads, device="cpu")
    device = setup(run)
    init_distributed(device)
    model = ModelConfig(str(models_dir(arguments) / "policy"), dtype=arguments.dtype)
    policy = load_causal_lm(model)
    trained = Engine(PolicyModel(policy, temperature=1.0), EngineConfig(), device=device)
    trained.eval()
    prompts = read_prompts(models_dir(arguments), arguments.samples)
    longest = max(map(len, prompts)) + arguments.response_length
    probe = Probe(
        [Prompt(number, token_ids, "") for number, token_ids in enumerate(prompts)], policy.config.vocab_size,
        max_length=longest, max_gap=MAX_GAP[arguments.dtype],
    ).target(trained)  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.hf_weights()}
    config = TrainingGenerationConfig(
        max_length=arguments.response_length, ignore_eos=True, engines=EnginesConfig(count=1)
    )
    with ExitStack() as stack:
        pool = make_engine_pool(
            model, config, run, device=device, max_model_len=longest, weight_shapes=shapes, stop_strings=False
        )
        stack.enter_context(closing(pool))
        store = stack.enter_context(closing(make_weight_store("engines-benchmark", run.output_dir)))
        generator = make_generator(
            model, config, tokenizer=load_tokenizer(model.path), device=device, seed=run.seed, max_model_len=longest,
            weight_shapes=shapes,
        )  # fmt: skip
        assert isinstance(generator, VLLMGenerator)
        versions = count(1)

        def publish_and_load() -> int:
            version = next(versions)
            store.keep([])  # as a run does before it publishes
            pool.load(store.publish(OwnWeights(version, trained.hf_weights(), probe)))
            return version

        sides: dict[str, Callable[[], Stream]] = {
            OURS: partial(generator.stream, 0),
            ENGINE: partial(pool.stream, publish_and_load()),
        }
        sampling, waited = sample_in_turn(sides, requests_of(prompts, arguments.response_length), arguments.rounds)
        loads: dict[str, Callable[[], object]] = {
            OURS: lambda: reload_weights(generator, trained.hf_weights()),
            ENGINE: publish_and_load,
        }
        return sampling, waited, alternate(loads, arguments.loads)


def sample_in_turn(
    sides: dict[str, Callable[[], Stream]], requests: list[GenerationRequest], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each side, and CPU seconds that the other one used meanwhile."""
    samples: dict[str, dict[SampleId, list[int]]] = {}
    used: dict[str, list[float]] = {name: [] for name in sides}
    (engine,) = (
        each
        for each in psutil.Process().children(recursive=True)
        if any("serve_engine" in word for word in each.cmdline())
    )
    waiting = {OURS: engine, ENGINE: psutil.Process()}

    def sample(name: str) -> None:
        before = waiting[name].cpu_times()
        stream = sides[name]()
        stream.submit(requests)
        samples[name] = {each.request.sample: each.token_ids.tolist() for each in stream.completed()}
        after = waiting[name].cpu_times()
        used[name].append(after.user + after.system - before.user - before.system)

    seconds = alternate({name: partial(sample, name) for name in sides}, rounds)
    assert samples[OURS] == samples[ENGINE], "the two sides did other work"
    return seconds, {name: median(each[1:]) for name, each in used.items()}


if __name__ == "__main__":
    main()
