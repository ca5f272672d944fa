"""Samples on disk."""

import json

import torch
from transformers import AutoTokenizer

from nemo_style_rlhf.models.decoding import decoder_loader
from nemo_style_rlhf.ppo.metrics import rollout_columns
from nemo_style_rlhf.tracking.rollouts import RolloutWriter
from tests.support.models import save_tokenizer
from tests.support.rollouts import UnluckyScorer, collect


def test_what_a_failed_sample_lacks_is_null_on_disk(tmp_path):
    """Readers of JSON Lines other than Python's refuse NaN. The process that writes needs the folder and the tokenizer only."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    experience = collect(scorer=UnluckyScorer())
    failed = experience.scores.failures
    experience.scores.extra["length"] = torch.where(failed, torch.nan, 3.0)
    writer = RolloutWriter(tmp_path / "rollouts", decoder_loader(tokenizer, str(tmp_path), trust_remote_code=False))
    for step in (1, 2):
        writer.write(step, rollout_columns(experience))
    writer.flush()
    writer.close()
    texts = [(tmp_path / "rollouts" / f"step_{step:06d}.jsonl").read_text() for step in (1, 2)]
    assert texts[0] == texts[1] and "NaN" not in texts[0]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    lacking = [row["reward"] is None and row["length"] is None for row in rows]
    assert lacking == failed.tolist() and any(lacking) and not all(lacking)
    assert [row["response"] for row in rows] == [tokenizer.decode(r.response_tokens) for r in experience.rollouts]
    assert [row["response_tokens"] for row in rows] == [len(r.response_tokens) for r in experience.rollouts]
