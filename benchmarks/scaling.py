"""A simulator of a PPO step on 12 to 96 nodes: where the time goes, and which lever pays next.

    .venv-actor/bin/python benchmarks/scaling.py --plot docs/images/scaling.png

It is a model, not a measurement. It is calibrated on NeMo-Aligner's published steps of Llama 3 70B, with two free parameters: the
longest response, and the seconds of a step that no node shortens. Everything else is in `INPUTS`, with its source. Prints the
report of docs/scaling.md as Markdown.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from report import table

INPUTS: dict[str, tuple[float, str, str]] = {
    "peak": (989e12, "FLOP/s of a GPU, bf16, dense", "H100 SXM data sheet"),
    "memory": (3.35e12, "bytes/s of a GPU's memory", "H100 SXM data sheet"),
    "nvlink": (450e9, "bytes/s of a GPU within its node, each way", "H100 SXM data sheet"),
    "network": (50e9, "bytes/s of a GPU to other nodes, each way", "DGX H100 data sheet: 400 Gb/s a GPU"),
    "pcie": (64e9, "bytes/s of a GPU to its host, each way", "H100 SXM data sheet: PCIe 5"),
    "gpus": (8, "GPUs of a node", "DGX H100 data sheet"),
    "parameters": (70.6e9, "parameters", "Llama 3 70B"),
    "kv": (80 * 2 * 8 * 128 * 2, "bytes of a token in the KV cache", "Llama 3 70B: 80 layers, 8 heads of 128, bf16"),
    "compute_share": (0.40, "share of the peak that forward and backward reach", "the Llama 3 paper: 0.38 to 0.43"),
    "decode_share": (0.60, "share of the memory's bandwidth that decoding reaches", "assumed"),
    "network_share": (0.70, "share of the network's bandwidth that collectives reach", "assumed"),
    "samples": (1024, "rollouts of a step", "NeMo-Aligner's user guide, RLHF"),
    "batch": (128, "samples of an optimizer step", "NeMo-Aligner's user guide, RLHF"),
    "prompt": (300, "tokens of a prompt", "assumed"),
    "response": (335, "tokens of a response, mean", "NeMo-Aligner's user guide, RLHF: 323 to 351"),
    "aligner_decode": (2.5e-3, "seconds of a decoding step beside the memory's, TensorRT-LLM", "assumed"),
    "aligner_batch": (8, "samples that are decoded together, each batch to its end", "NeMo-Aligner's user guide, RLHF"),
    "aligner_64": (16, "the same on 64 nodes", "NeMo-Aligner's user guide, RLHF"),
    "aligner_stages": (4, "pipeline stages, beside tensor parallelism within a node", "assumed: the critic fits 4 nodes"),
    "our_decode": (11e-3, "seconds of a decoding step beside the memory's, vLLM", "benchmarks.md, One GPU: with CUDA graphs"),
    "our_transfer": (4.2e9, "bytes/s of a verified transfer", "benchmarks.md, One GPU: 0.72 GB in 0.17 s"),
    "our_serial": (1.13, "seconds beside the models, 1,024 x 4,096 tokens", "benchmarks.md, What training waits for"),
    "our_protocol": (0.61, "seconds of one request and one train step of as many", "benchmarks.md, Protocol"),
    "our_group": (32, "samples of a scoring request", "SCORING_GROUP in rollout/producer.py"),
    "our_budget": (16384, "tokens of a micro-batch", "engine.micro_batch_tokens, its default"),
}  # fmt: skip
"""Value, meaning and source of every input."""
UNSURE = {
    "compute_share": 0.2,
    "decode_share": 0.25,
    "network_share": 0.3,
    "prompt": 0.5,
    "aligner_decode": 0.5,
    "our_decode": 0.4,
    "our_transfer": 0.5,
}
"""Standard deviation of the logarithm of those that are assumed, or measured on something else."""
PUBLISHED = {(8, 4): 366.7, (16, 8): 190.4, (32, 16): 108.0, (64, 32): 56.9}
"""Seconds of a step by nodes of actor and critic: NeMo-Aligner, arXiv 2405.01481."""
NODES = (12, 24, 48, 96)
WAYS = ("together", "lag", "turns")
PARTS = ("generate", "score", "log-probabilities", "update", "transfer", "other")


@dataclass(frozen=True)
class World:
    """The inputs as attributes, the two free parameters, and our levers."""

    values: Mapping[str, float]
    longest: float = 0.0
    """Tokens of the longest response: the first free parameter."""
    fixed: float = 0.0
    """Seconds of a step that no node shortens: the second."""
    sized_requests: bool = False
    """A scoring request has samples for every rank."""
    spread: bool = False
    """Micro-batches are as small as it takes to give every rank one."""
    within_nodes: bool = False
    """Weights are gathered within a node, each of which holds all of them."""
    fast_transfer: bool = False
    """Weights reach engines at the speed of the network."""

    def __getattr__(self, name: str) -> float:
        return self.values[name]

    @property
    def tokens(self) -> float:
        """Tokens of all samples, prompts included."""
        return self.samples * (self.prompt + self.response)

    @property
    def bytes(self) -> float:
        """Bytes of the weights in bf16."""
        return 2 * self.parameters

    def compute(self, passes: float, tokens: float, gpus: float) -> float:
        """Seconds of ``passes`` forwards; a backward counts as two."""
        return 2 * passes * self.parameters * tokens / (gpus * self.peak * self.compute_share)

    def decode(self, together: float, context: float, beside: float) -> float:
        """Seconds of a decoding step of one node, whose GPUs hold the model together."""
        return (self.bytes + together * context * self.kv) / (self.gpus * self.memory * self.decode_share) + beside

    @property
    def gather(self) -> float:
        """Seconds in which a rank receives all weights, a layer at a time (ZeRO-3)."""
        speed = self.nvlink if self.within_nodes else self.network
        return self.bytes / (speed * self.network_share)


def aligner(world: World, actor: int, critic: int) -> dict[str, float]:
    """Seconds of NeMo-Aligner's step, by part: batches of samples one after the other, pipelines, critic beside the actor."""
    together = world.aligner_64 if actor == 64 else world.aligner_batch
    batches = math.ceil(world.samples / actor / together)
    step = world.decode(together, world.prompt + world.longest / 2, world.aligner_decode)

    def pipelined(nodes: int, passes: float, batch: float) -> float:
        replicas = nodes / world.aligner_stages
        bubble = 1 + (world.aligner_stages - 1) / (batch / replicas)
        return world.compute(passes, world.tokens, nodes * world.gpus) * bubble

    return {
        "generate": batches * world.longest * step,
        "score": 0.0,  # while it generates
        "log-probabilities": 2 * pipelined(actor, 1, world.samples),
        "update": max(pipelined(nodes, 3, world.batch) for nodes in (actor, critic)),
        "transfer": 0.0,  # part of what no node shortens
        "other": world.fixed,
    }


def fitted(world: World, published: Mapping[tuple[int, int], float]) -> World:
    """The world whose two free parameters have the least squares of relative errors."""
    seconds = np.array(list(published.values()))
    weights = seconds**-2 / (seconds**-2).sum()

    def of(longest: float) -> tuple[float, World]:
        bare = replace(world, longest=longest, fixed=0.0)
        parts = np.array([sum(aligner(bare, *nodes).values()) for nodes in published])
        fixed = max(0.0, float((weights * (seconds - parts)).sum()))
        return float((((parts + fixed) / seconds - 1) ** 2).sum()), replace(bare, fixed=fixed)

    return min((of(longest) for longest in range(100, 6000, 10)), key=lambda each: each[0])[1]


# --- ours ----------------------------------------------------------------------------------------------------------------


def lengths(world: World, seed: int = 0) -> np.ndarray:
    """Tokens of each response, drawn from a log-normal distribution that is cut at the longest."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.8, int(world.samples))
    low, high = 0.0, 10 * world.longest
    for _ in range(40):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(drawn * scale, world.longest).mean() < world.response else (low, scale)
    return np.minimum(drawn * scale, world.longest)


def generation(world: World, replicas: int) -> np.ndarray:
    """Seconds after which each sample is complete; samples are dealt to the replicas in turn, and decoded together."""
    given, ends = lengths(world), np.empty(int(world.samples))
    for replica in range(replicas):
        own = np.arange(replica, len(given), replicas)
        order = own[given[own].argsort()]
        now, before = 0.0, 0.0
        for place, sample in enumerate(order):  # as samples end, fewer are decoded together
            context = world.prompt + (before + given[sample]) / 2
            now += (given[sample] - before) * world.decode(len(order) - place, context, world.our_decode)
            ends[sample], before = now, given[sample]
    return ends


def rounds(world: World, samples: float, ranks: float) -> tuple[int, float]:
    """Micro-batches of the busiest rank, and the tokens of one of them."""
    each = world.tokens / world.samples
    budget = max(each, min(world.our_budget, samples * each / ranks)) if world.spread else world.our_budget
    count = math.ceil(samples * each / max(each, budget))
    return math.ceil(count / ranks), min(budget, samples * each)


def passes(world: World, samples: float, ranks: float, forwards: float, gathers: float) -> float:
    """Seconds of a model over samples: weights are gathered for every micro-batch while another is computed."""
    count, tokens = rounds(world, samples, ranks)
    return count * max(world.compute(forwards, tokens, 1), gathers * world.gather)


def scored(world: World, ends: np.ndarray, ranks: float) -> float:
    """Seconds after which the last score is there: requests wait for each other, and each is of two models."""
    group = int(world.our_group if not world.sized_requests else min(len(ends), max(world.our_group, ranks)))
    arrivals = sorted(ends[start : start + group].max() for start in range(0, len(ends), group))
    now = 0.0
    for arrival in arrivals:
        now = max(now, arrival) + 2 * passes(world, group, ranks, 1, 1)
    return now


def ours(world: World, nodes: int, way: str) -> dict[str, float]:
    """Seconds of our step, by part; ``way`` is `together`, `lag` (engines beside the trainer) or `turns`.

    Two thirds of the nodes are the actor's, a third is the critic's. With lag, half of the actor's nodes are engines. In turns,
    all nodes do everything, and the critic's update follows the actor's.
    """
    if way == "turns":
        actor, critic, engines = nodes, nodes, nodes
    else:
        actor, critic = nodes * 2 // 3, nodes // 3
        engines = actor // 2 if way == "lag" else actor
        actor = actor - engines if way == "lag" else actor
    ranks, critic_ranks = actor * world.gpus, critic * world.gpus
    ends = generation(world, engines)
    done, updates = float(ends.max()), math.ceil(world.samples / world.batch)
    update, other = (updates * passes(world, world.batch, each, 3, 3) for each in (ranks, critic_ranks))
    size = world.tokens / (1024 * 4096)
    parts = {
        "generate": done,
        "score": scored(world, ends, critic_ranks) - done,
        "log-probabilities": 2 * passes(world, world.samples, ranks, 1, 1),
        "update": update + other if way == "turns" else max(update, other),
        "transfer": world.bytes / (world.network if world.fast_transfer else world.our_transfer),
        "other": size * (world.our_serial + world.our_protocol),
    }
    if way == "turns":  # weights, gradients and optimizer states of both models leave and return
        parts["other"] += 2 * 2 * 18 * world.parameters / ranks / world.pcie
        parts["score"] = scored(world, np.zeros_like(ends), critic_ranks)
    if way == "lag":  # the longer side decides
        training = sum(parts.values()) - done - parts["score"]
        shown = max(0.0, done + parts["score"] - training)
        parts |= {
            "generate": shown * done / (done + parts["score"]),
            "score": shown * parts["score"] / (done + parts["score"]),
        }
    return parts


LEVERS = {
    "scoring requests sized by the ranks": {"sized_requests": True},
    "a micro-batch for every rank": {"spread": True},
    "both": {"sized_requests": True, "spread": True},
    "... and weights gathered within nodes": {"sized_requests": True, "spread": True, "within_nodes": True},
    "... and weights sent at the network's speed": {
        "sized_requests": True, "spread": True, "within_nodes": True, "fast_transfer": True,
    },
}  # fmt: skip
ALL = LEVERS["... and weights sent at the network's speed"]


# --- report --------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="also draw a PNG")
    parser.add_argument("--draws", type=int, default=100, help="worlds for the uncertainty")
    arguments = parser.parse_args()
    plain = World({name: value for name, (value, _, _) in INPUTS.items()})
    world = fitted(plain, PUBLISHED)
    inputs = [[what, f"{value:,g}", source] for value, what, source in INPUTS.values()]
    print(table(["input", "value", "source"], inputs) + "\n")
    print(
        f"Fitted: the longest response has {world.longest:,.0f} tokens, {world.fixed:.1f} s are shortened by no node.\n"
    )
    print(table(["nodes", "published, s", "simulated", "error", "left out"], calibration(plain, world)) + "\n")
    worlds = [fitted(drawn(plain, seed), PUBLISHED) for seed in range(arguments.draws)]
    for title, levers in (("as it is", {}), ("with all levers", ALL)):
        print(f"{title}:\n")
        print(table(["nodes", "way", *PARTS, "step, s", "80 % of worlds"], steps(world, worlds, levers)) + "\n")
    print(table(["levers, 96 nodes, together", *PARTS, "step, s"], levered(world)))
    if arguments.plot:
        plot(world, arguments.plot)


def drawn(plain: World, seed: int) -> World:
    """A world in which what is unsure is another."""
    rng = np.random.default_rng(seed)
    values = {name: plain.values[name] * math.exp(rng.normal(0, spread)) for name, spread in UNSURE.items()}
    for name in ("compute_share", "decode_share", "network_share"):
        values[name] = min(0.95, values[name])
    return replace(plain, values={**plain.values, **values})


def calibration(plain: World, world: World) -> list[list[str]]:
    rows = []
    for nodes, seconds in PUBLISHED.items():
        simulated = sum(aligner(world, *nodes).values())
        rest = {each: value for each, value in PUBLISHED.items() if each != nodes}
        without = sum(aligner(fitted(plain, rest), *nodes).values())
        errors = [f"{value / seconds - 1:+.1%}" for value in (simulated, without)]
        rows.append([f"{nodes[0]}+{nodes[1]}", f"{seconds}", f"{simulated:.1f}", *errors])
    return rows


def steps(world: World, worlds: Sequence[World], levers: Mapping[str, bool]) -> list[list[str]]:
    rows = []
    for nodes in NODES:
        for way in WAYS:
            parts = ours(replace(world, **levers), nodes, way)
            totals = [sum(ours(replace(each, **levers), nodes, way).values()) for each in worlds]
            low, high = np.percentile(totals, [10, 90])
            numbers = [f"{parts[name]:.1f}" for name in PARTS]
            rows.append([str(nodes), way, *numbers, f"**{sum(parts.values()):.0f}**", f"{low:.0f} to {high:.0f}"])
    return rows


def levered(world: World) -> list[list[str]]:
    rows = []
    for title, levers in {"none": {}, **LEVERS}.items():
        parts = ours(replace(world, **levers), NODES[-1], "together")
        rows.append([title, *(f"{parts[name]:.1f}" for name in PARTS), f"**{sum(parts.values()):.0f}**"])
    return rows


def plot(world: World, target: Path) -> None:
    """Bars of the parts, for all nodes and ways, as it is and with all levers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axis, (title, levers) in zip(axes, (("as it is", {}), ("with all levers", ALL)), strict=True):
        bars = {"NeMo-Aligner": [aligner(world, *nodes) for nodes in PUBLISHED]}
        bars |= {
            way: [ours(replace(world, **levers), nodes, way) for nodes in NODES] for way in ("together", "lag", "turns")
        }
        for number, simulated in enumerate(bars.values()):
            places, bottom = np.arange(len(NODES)) + (number - 1.5) * 0.2, np.zeros(len(NODES))
            for name, color in zip(PARTS, plt.get_cmap("tab10").colors):
                heights = np.array([parts[name] for parts in simulated])
                axis.bar(places, heights, 0.17, bottom=bottom, color=color, label=name if number == 0 else None)
                bottom += heights
        axis.set(
            title=title,
            xlabel="nodes: NeMo-Aligner, together, lag 1, in turns",
            ylabel="seconds of a step",
        )
        axis.set_xticks(range(len(NODES)), [str(each) for each in NODES])
        axis.grid(axis="y", alpha=0.3)
    axes[1].legend()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
