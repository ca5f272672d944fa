"""Scores with a reward model in this process. It reads text, so that its tokenizer may differ from the checkpoints'."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from nemo_style_rlhf.data.ragged import micro_batches, pad
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.scalar import PooledModel, max_positions, pad_token
from nemo_style_rlhf.models.scalar_loading import load_reward_model
from nemo_style_rlhf.schema.evaluation import EvaluationModelConfig, RewardModelSourceConfig
from nemo_style_rlhf.schema.templates import unrendered
from nemo_style_rlhf.scoring.combined import stacked
from nemo_style_rlhf.scoring.futures import resolved
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample


class RewardModelScorer:
    """Scores at once, in the calling thread; the returned future is done."""

    def __init__(
        self,
        config: RewardModelSourceConfig,
        model: EvaluationModelConfig,
        device: torch.device,
        *,
        prompt_template: str | None = None,
    ) -> None:
        """The weights stay in host memory until the first sample is scored, so that generation has the device to itself.

        Args:
            prompt_template: the policies' template; the reward model's own replaces it.

        Raises:
            UserError: the checkpoint is missing or is not a reward model.
        """
        assert config.path is not None  # otherwise the source is not in use
        self._path = config.path
        self._device = device
        self._token_budget = config.micro_batch_tokens
        tokenizer = load_tokenizer(config.path, trust_remote_code=model.trust_remote_code)
        self._prompt_template = prompt_template
        reward_model = load_reward_model(
            model.at(config.path, config.dtype), normalize=config.normalize_rewards, label_weights=config.label_weights
        )
        self._model = reward_model.requires_grad_(False).eval()
        as_pair = isinstance(reward_model, PooledModel)
        self._text = RewardText(config.path, tokenizer, append_eos=config.append_eos, as_pair=as_pair)
        self._pad_token_id = pad_token(reward_model.hf)
        self._max_length = max_positions(reward_model.hf)

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        read = [self._read(sample) for sample in samples]
        rewards = iter(self._rewards([ids for ids in read if not isinstance(ids, RewardError)]))
        return resolved(
            stacked([ids if isinstance(ids, RewardError) else Scores(torch.tensor([next(rewards)])) for ids in read])
        )

    def close(self) -> None:
        """Do nothing: only memory needs to be released."""

    @torch.no_grad()
    def _rewards(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self._model.to(self._device)
        lengths = [len(ids) for ids in sequences]
        rewards = [0.0] * len(sequences)
        for rows in micro_batches(lengths, token_budget=self._token_budget):
            row_lengths = torch.tensor([lengths[row] for row in rows])
            flat = torch.tensor([token for row in rows for token in sequences[row]])
            token_ids = pad(flat, row_lengths.tolist(), value=self._pad_token_id or 0)
            attention_mask = (torch.arange(token_ids.shape[1]) < row_lengths[:, None]).long()
            scored = self._model.rewards(token_ids.to(self._device), attention_mask.to(self._device))
            for row, reward in zip(rows, scored.tolist(), strict=True):
                rewards[row] = reward
        return rewards

    def _read(self, sample: ScoringSample) -> list[int] | RewardError:
        """Token ids of a sample, or the reason why it has no reward."""
        prompt = sample.chat or unrendered(self._prompt_template, sample.prompt)
        try:
            ids = self._text.token_ids(prompt, sample.response)
        except UserError as error:
            return RewardError(str(error))
        if self._max_length is None or len(ids) <= self._max_length:
            return ids
        return RewardError(
            f"a prompt and response of {len(ids)} tokens is longer than the {self._max_length} positions of the reward "
            f"model {self._path}: lower data.max_prompt_length or generation.max_length"
        )
