"""A simulator of a PPO step on 12 to 96 nodes: where the time goes, and which lever pays next.

    .venv-actor/bin/python benchmarks/scaling.py --plot docs/images/scaling.png

It is a model, not a measurement. It is calibrated on NeMo-Aligner's published steps of Llama 3 70B, with two free parameters: the
seconds for which a sample's token occupies a node, and the seconds of a step that no node shortens. Everything else is in
`INPUTS`, with its source. Prints the report of docs/scaling.md as Markdown.
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
    "network": (50e9, "bytes/s of a network card, each way", "DGX H100 data sheet: 400 Gb/s"),
    "cards": (8, "network cards of a node", "DGX H100 data sheet"),
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
    "longest": (1024, "tokens of a response, at most", "NeMo-Aligner's user guide, RLHF: its script's max_length"),
    "aligner_stages": (4, "pipeline stages, beside tensor parallelism within a node", "assumed: the critic fits 4 nodes"),
    "our_decode": (11e-3, "seconds of a decoding step beside the memory's, vLLM", "benchmarks.md, One GPU: with CUDA graphs"),
    "our_transfer": (4.2e9, "bytes/s of a verified transfer", "benchmarks.md, One GPU: 0.72 GB in 0.17 s"),
    "our_serial": (0.40, "seconds beside the models, 1,024 x 4,096 tokens", "benchmarks.md, Ranks"),
    "our_protocol": (0.02, "seconds of the last scoring request, 256 x 4,096 tokens", "benchmarks.md, Ranks"),
    "our_group": (32, "samples of a scoring request, for each rank", "SCORING_GROUP in rollout/producer.py"),
    "our_budget": (16384, "tokens of a micro-batch", "engine.micro_batch_tokens, its default"),
}  # fmt: skip
"""Value, meaning and source of every input."""
UNSURE = {
    "compute_share": 0.2,
    "decode_share": 0.25,
    "network_share": 0.3,
    "prompt": 0.5,
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
    per_token: float = 0.0
    """Seconds for which a sample's token occupies a node of NeMo-Aligner's: the first free parameter."""
    fixed: float = 0.0
    """Seconds of a step that no node shortens: the second."""
    sized_requests: bool = True
    """A scoring request has samples for every rank."""
    spread: bool = True
    """Micro-batches are as small as it takes to give every rank one."""
    within_nodes: bool = False
    """Weights come from other nodes once per optimizer step, then each node holds all of them (zero_hpz_partition_size)."""
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

    def collective(self, *, within_node: bool = False) -> float:
        """Seconds in which all ranks receive all weights, or reduce all gradients, a layer at a time (ZeRO-3). What enters a node
        through one of its cards goes on within the node, so that all cards share the work."""
        speed = self.nvlink if within_node else min(self.nvlink, self.cards * self.network)
        return self.bytes / (speed * self.network_share)


def aligner(world: World, actor: int, critic: int) -> dict[str, float]:
    """Seconds of NeMo-Aligner's step, by part: samples are dealt to the nodes, models are pipelines, the critic works beside."""

    def pipelined(nodes: int, passes: float, batch: float) -> float:
        replicas = nodes / world.aligner_stages
        bubble = 1 + (world.aligner_stages - 1) / (batch / replicas)
        return world.compute(passes, world.tokens, nodes * world.gpus) * bubble

    return {
        "generate": world.samples / actor * world.response * world.per_token,
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

    def of(per_token: float) -> tuple[float, World]:
        bare = replace(world, per_token=per_token, fixed=0.0)
        parts = np.array([sum(aligner(bare, *nodes).values()) for nodes in published])
        fixed = max(0.0, float((weights * (seconds - parts)).sum()))
        return float((((parts + fixed) / seconds - 1) ** 2).sum()), replace(bare, fixed=fixed)

    return min((of(1e-5 * each) for each in range(1, 3000)), key=lambda each: each[0])[1]


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


def passes(world: World, samples: float, ranks: float, *, trains: bool = False, changed: bool = False) -> float:
    """Seconds of a model over samples. While a micro-batch is computed, weights are gathered, for a backward again, and gradients
    reduced.

    Args:
        changed: whether the weights differ from those of the pass before, so that all nodes need them anew.
    """
    count, tokens = rounds(world, samples, ranks)
    computed = world.compute(3 if trains else 1, tokens, 1)
    near, far = world.collective(within_node=world.within_nodes), world.collective()
    moved = (2 * near + far) if trains else near
    first = max(computed, moved + (far - near if changed else 0.0))
    return first + (count - 1) * max(computed, moved)


def scored(world: World, ends: np.ndarray, ranks: float) -> float:
    """Seconds after which the last score is there: requests wait for each other, and each is of two models."""
    group = int(min(len(ends), world.our_group * (ranks if world.sized_requests else 1)))
    arrivals = sorted(ends[start : start + group].max() for start in range(0, len(ends), group))
    now = 0.0
    for arrival in arrivals:
        now = max(now, arrival) + 2 * passes(world, group, ranks)
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
    update, other = (
        updates * passes(world, world.batch, each, trains=True, changed=True) for each in (ranks, critic_ranks)
    )
    size = world.tokens / (1024 * 4096)
    parts = {
        "generate": done,
        "score": scored(world, ends, critic_ranks) - done,
        "log-probabilities": sum(passes(world, world.samples, ranks, changed=each) for each in (True, False)),
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
    "requests of 32 samples, micro-batches of 16,384 tokens": {"sized_requests": False, "spread": False},
    "requests sized by the ranks": {"sized_requests": True, "spread": False},
    "micro-batches spread over the ranks": {"sized_requests": False, "spread": True},
    "both: the defaults": {},
    "... and engine.zero_hpz_partition_size=8": {"within_nodes": True},
    "... and weights sent at the network's speed": {"within_nodes": True, "fast_transfer": True},
}
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
        f"Fitted: a token occupies a node for {1000 * world.per_token:.2f} ms, {world.fixed:.1f} s are shortened by no node.\n"
    )
    print(table(["nodes", "published, s", "simulated", "error", "left out"], calibration(plain, world)) + "\n")
    worlds = [fitted(drawn(plain, seed), PUBLISHED) for seed in range(arguments.draws)]
    for title, levers in (("with the defaults", {}), ("with all levers", ALL)):
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
    for title, levers in LEVERS.items():
        parts = ours(replace(world, **levers), NODES[-1], "together")
        rows.append([title, *(f"{parts[name]:.1f}" for name in PARTS), f"**{sum(parts.values()):.0f}**"])
    return rows


def plot(world: World, target: Path) -> None:
    """Bars of the parts, for all nodes and ways, with the defaults and with all levers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axis, (title, levers) in zip(axes, (("with the defaults", {}), ("with all levers", ALL)), strict=True):
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
