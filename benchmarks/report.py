"""The Markdown report of benchmarks/ppo_step.py."""

import argparse
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rounds import Measured

median = statistics.median

PHASES = {
    "generate": ("generate_bare", "vLLM's generate"),
    "wait_for_rollout": ("generate_bare", "vLLM's generate"),
    "logprobs": ("policy_forward", "policy forward"),
    "reference_logprobs": ("policy_forward", "policy forward"),
    "wait_for_scores": ("critic_forward", "2 x critic forward, in the server from the end of decoding on"),
    "actor_update": ("policy_forward_backward", "policy forward and backward"),
    "wait_for_critic": (
        "critic_forward_backward",
        "critic forward and backward, in the server beside the actor's update",
    ),
    "weight_transfer": ("reload_weights_bare", "vLLM's reload_weights"),
}
"""The bare compute that belongs to each phase, and its description."""


def markdown(
    arguments: argparse.Namespace, ours: "Measured", peer: "Measured | None", bare: "dict[str, Any] | None"
) -> str:
    parts = [
        f"### {arguments.model}, {arguments.samples} samples x {arguments.response_length} tokens, "
        f"{arguments.mini_batches} mini-batches, {arguments.threads} threads, {arguments.dtype}"
        + (", compiled" if arguments.compile else ""),
        table(*phase_rows(ours, bare)),
        table(*summary_rows(arguments, ours, peer)),
    ]
    if peer is not None and peer.phases:
        parts += [
            table(["TRL phase", "seconds"], [[name, f"{median(each):.2f}"] for name, each in peer.phases.items()])
        ]
    if bare is not None:
        parts.append(bare_sentence(bare))
    return "\n\n".join(parts)


def phase_rows(ours: "Measured", bare: "dict[str, Any] | None") -> tuple[list[str], list[list[str]]]:
    """Phases in the order of a step. ``critic_train`` runs in parallel with the actor's update and is not part of the sum."""
    total = median(ours.step_seconds)
    rows = []
    for name, seconds in ours.phases.items():
        overlapped = name == "critic_train"
        share = "(overlapped)" if overlapped else f"{median(seconds) / total:.0%}"
        row = [name, f"{median(seconds):.3f}", share]
        if bare is not None:
            key, what = PHASES.get(name, ("", ""))
            count = 2 if name == "wait_for_scores" else 1
            row += [*(f"{part * count:.3f}" for part in (bare[key], products(bare, key))), what] if key else [""] * 3
        rows.append(row)
    rows.append(["**step**", f"**{total:.3f}**", "100%"])
    if bare is not None:
        computed = [PHASES[name][0] for name in ours.phases if name in PHASES]
        computed += ["critic_forward"] * computed.count("critic_forward")  # both models'
        needed, bound = sum(bare[key] for key in computed), sum(products(bare, key) for key in computed)
        rows[-1] += [f"**{needed:.3f}**", f"**{bound:.3f}**", "sum of the parts, one after the other"]
        rows.append(["step over these", "", "", f"**{total / needed:.2f}**", f"**{total / bound:.2f}**", ""])
    return ["phase", "seconds", "share", *(["bare", "products", "bare compute is"] if bare is not None else [])], rows


def products(bare: dict[str, Any], key: str) -> float:
    """Seconds of the matrix products in a bare part; 0 for a part without any."""
    return float(bare.get(f"{key.removesuffix('_bare')}_products", 0.0))


def summary_rows(
    arguments: argparse.Namespace, ours: "Measured", peer: "Measured | None"
) -> tuple[list[str], list[list[str]]]:
    def column(side: "Measured") -> list[str]:
        seconds = median(side.step_seconds)
        return [
            f"{seconds:.2f}",
            " ".join(f"{each:.2f}" for each in side.round_medians),
            f"{arguments.samples / seconds:.1f}",
            f"{arguments.samples * arguments.response_length / seconds:,.0f}",
            ", ".join(f"{process} {peak / 2**30:.2f}" for process, peak in side.peak_rss_bytes.items()),
        ]

    names = ["seconds per step (median)", "medians of the rounds", "samples/s", "response tokens/s", "peak RSS, GiB"]
    columns = [names, column(ours)] + ([column(peer)] if peer is not None else [])
    rows = [list(row) for row in zip(*columns, strict=True)]
    if peer is not None:
        ratio = median(peer.step_seconds) / median(ours.step_seconds)
        rows.append(["**samples/s over TRL's**", f"**{ratio:.2f}**", "1"])
    return ["", "nemo_style_rlhf", *(["TRL"] if peer is not None else [])], rows


def bare_sentence(bare: dict[str, Any]) -> str:
    transfer = bare["transfer_verified"] / bare["reload_weights_bare"]
    generation = bare["generate_streamed"] / bare["generate_bare"]
    return (
        f"Weights verified by digest arrive in {bare['transfer_verified'] * 1e3:.0f} ms, {transfer:.2f} times a bare "
        f"`reload_weights` ({bare['reload_weights_bare'] * 1e3:.0f} ms). Generation as a stream with seeds and "
        f"log-probabilities, alone: {bare['generate_streamed']:.2f} s, {generation:.2f} times vLLM's own `generate`."
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
