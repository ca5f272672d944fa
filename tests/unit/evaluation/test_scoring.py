"""The reward model of an evaluation reads prompts as it did in training, whatever the policies read."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_style_rlhf.data.prompts import load_prompts
from nemo_style_rlhf.data.template_files import write_template
from nemo_style_rlhf.evaluation.scoring import build_scorer
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.scoring.interface import ScoringSample
from tests.support.models import WORDS, save_reward_model


@pytest.mark.parametrize("policys", [None, "{prompt} w9", "w5 {prompt}"])
@pytest.mark.parametrize("trained", [None, "{prompt} w9"])
def test_prompts_stand_in_the_reward_models_template_and_in_no_other(
    tmp_path: Path, policys: str | None, trained: str | None
) -> None:
    path = save_reward_model(tmp_path / "reward", pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    write_template(path, trained, tokenizer, append_eos=True)
    words = ["w1", "w1 w9", "w5 w1"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in words))
    config = EvaluationConfig(checkpoints=["unused"])
    config.data.prompt_template = policys
    config.reward.model.path, config.reward.model.dtype = str(path), "float32"
    prompts, _ = load_prompts(str(tmp_path / "rows.jsonl"), config.data, tokenizer)
    samples = [ScoringSample.of_texts(torch.tensor(prompt.token_ids), prompt.text, " w2") for prompt in prompts]
    scorer = build_scorer(config, torch.device("cpu"))
    assert scorer is not None
    scores = scorer.score(samples).result().rewards.tolist()
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    for prompt, score in zip(words, scores, strict=True):
        ids = torch.tensor(
            [[WORDS.index(word) for word in f"{(trained or '{prompt}').format(prompt=prompt)} w2 <eos>".split()]]
        )
        with torch.no_grad():
            assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
    assert len(set(scores)) == len(words)
