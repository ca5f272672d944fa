"""The page that shows responses side by side: one HTML file with its style, its script and its data."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.evaluation.summary import CheckpointSummary
from nemo_style_rlhf.schema.evaluation import EvaluationConfig

FOLDER = Path(__file__).parent
DIGITS = 6
"""Digits of scores in the page; results.jsonl has them in full."""


def render_page(
    config: EvaluationConfig, summaries: Sequence[CheckpointSummary], samples: dict[str, list[Sample]]
) -> str:
    """
    Args:
        summaries: one per checkpoint, in their order.
        samples: by name of the checkpoint, ordered by prompt and number.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scores = [summary.mean_score for summary in summaries if summary.mean_score is not None]
    return environment.get_template("page.html").render(
        style=Markup((FOLDER / "page.css").read_text()),
        script=Markup((FOLDER / "page.js").read_text()),
        data=embedded_json(page_data(summaries, samples)),
        config=config,
        summaries=summaries,
        best_score=max(scores, default=None),
        prompts=len({sample.prompt_id for of_checkpoint in samples.values() for sample in of_checkpoint}),
    )


def page_data(summaries: Sequence[CheckpointSummary], samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Data for the page's script: per prompt and checkpoint the responses as [text, score, tokens, truncated]."""
    rows: dict[int, dict[str, Any]] = {}
    names = [summary.name for summary in summaries]
    for column, name in enumerate(names):
        for sample in samples[name]:
            row = rows.setdefault(
                sample.prompt_id,
                {"id": sample.prompt_id, "prompt": sample.prompt, "label": sample.label, "cells": [[] for _ in names]},
            )
            score = None if sample.score is None else float(f"{sample.score:.{DIGITS}g}")
            row["cells"][column].append([sample.response, score, sample.length, sample.truncated])
    return {"checkpoints": names, "rows": [rows[prompt_id] for prompt_id in sorted(rows)]}


def embedded_json(data: object) -> Markup:
    """JSON for a script element, escaped so that no text in it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
