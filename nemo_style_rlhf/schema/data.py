"""The prompts of a PPO run, and how they become tokens."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.chat import require_date
from nemo_style_rlhf.schema.paths import CHECK, data_source
from nemo_style_rlhf.schema.sources import require_sources
from nemo_style_rlhf.schema.templates import PLACEHOLDER, chat_template_text, prompt_template_text

PROMPT_FORMATS = ("text", "messages", "hh")


@dataclass
class PromptTemplateConfig:
    """Templates that wrap the text of a prompt before it is tokenized."""

    prompt_template: str | None = None
    """Text around the prompt, e.g. "Question: {prompt}\\nAnswer:", or @file; null leaves prompts as they are."""
    chat_template: str | None = None
    """A Jinja chat template for `messages`: a file (its path, or @path) or the text itself; null uses the tokenizer's own. The
    model is exported with it."""
    input_key: str | None = None
    """Column whose text, if not empty, follows the prompt after a blank line; null is Alpaca's `input` where the prompt is its
    `instruction`, unless another setting names that column, and else none."""
    on_template_mismatch: str = setting("refuse", among=("refuse", "warn"))
    """refuse or warn if the model was trained with another prompt or chat template, or the critic server's reward model with
    another prompt template; SFT may change them and does neither."""
    prompt_key: str | None = None
    """Column of the prompt: a text, or a conversation. null finds it by its usual names: `prompt` or Alpaca's `instruction`, and
    for conversations `messages` or ShareGPT's `conversations`."""
    apply_chat_template: bool = False
    """Make prompts that are texts the user's message, for the chat template."""
    system_key: str | None = None
    """Column of a system prompt for the chat template, unless the conversation has its own; null is `system` if that is text."""
    today: str | None = None
    """The date that a chat template writes if it asks for one, such as 2026-11-27, in every process and at every start; null is
    the day of the run's first start (config.yaml keeps it)."""

    def validate(self) -> None:
        """Replace both templates by the texts of their files, so that these become part of the configuration."""
        if self.apply_chat_template and self.prompt_template is not None:
            raise UserError(
                "data.prompt_template is set but data.apply_chat_template=true takes a chat template: set data.chat_template "
                "instead, or data.apply_chat_template=false"
            )
        if self.today is not None:
            try:
                require_date(self.today)
            except ValueError:
                require(False, "data.today", self.today, "a date like 2026-11-27")
        if self.chat_template is not None:
            self.chat_template = chat_template_text(self.chat_template)
        if self.prompt_template is not None:
            self.prompt_template = prompt_template_text(self.prompt_template)
            found = self.prompt_template.count(PLACEHOLDER)
            require(
                found == 1,
                "data.prompt_template",
                repr(self.prompt_template),
                f"a text that holds {PLACEHOLDER} exactly once",
            )


@dataclass
class PromptRowsConfig(PromptTemplateConfig):
    """Settings for reading rows as prompts."""

    format: str = setting("text", among=PROMPT_FORMATS)
    """text (a string), messages (a list of {role, content}, or ShareGPT's of {from, value}) or hh (an Anthropic-HH transcript).
    Transcripts, and conversations that end with an answer, are cut before it. With apply_chat_template text may be either of
    the first two."""
    prompt_key: str | None = None
    """Column of the prompt; null is `prompt` or Alpaca's `instruction` for text, `messages`, ShareGPT's `conversations` or
    `prompt` for messages, `chosen` for hh."""
    label_key: str | None = None
    """Column of the reference answer for reward functions; null for none."""
    sampling_key: str | None = None
    """Column of a row's own sampling settings, in place of generation's: an object of temperature, top_p, top_k, min_length,
    max_length, stop and stop_token_ids; null for none."""
    max_prompt_length: int = setting(1024, gt=0, expected="a number of tokens above 0")
    """Maximum tokens of a prompt; longer prompts are dropped and counted, never cut."""

    @property
    def by_chat_template(self) -> bool:
        """True if a chat template renders the prompts, special tokens included."""
        return self.format == "messages" or self.apply_chat_template

    def validate(self) -> None:
        super().validate()
        if self.input_key is not None and self.format != "text":
            raise UserError(
                f"data.input_key is set but data.format={self.format} does not read it: set data.format=text"
            )
        if self.prompt_template is not None and self.format == "messages":
            raise UserError(
                "data.prompt_template is set but data.format=messages takes a chat template: set data.chat_template instead"
            )
        if self.chat_template is not None and not self.by_chat_template:
            raise UserError(
                f"data.chat_template is set but data.format={self.format} uses none: set data.format=messages, or "
                "data.apply_chat_template=true for prompts that are texts"
            )
        if self.system_key is not None and not self.by_chat_template:
            raise UserError(
                f"data.system_key is set but data.format={self.format} uses no chat template: set data.format=messages, or "
                "data.apply_chat_template=true for prompts that are texts"
            )


@dataclass
class MixedSourceConfig:
    """One source of a mixture."""

    path: Any = field(default=MISSING, metadata={CHECK: data_source})
    """As data.train_path."""
    weight: float = 1.0
    """Its share of the training rows is this, divided by the sum of all weights."""


@dataclass
class TrainingDataConfig:
    """Sources of training and validation rows."""

    train_path: Any = field(default=None, metadata={CHECK: data_source})
    """A .jsonl, .json (also .gz) or .parquet file; a pattern of files (`data/*.jsonl`); a folder of data files or written by
    `datasets`, or a hub name, as `name`, `name:split` or `name:config:split`; or a list of these, read one after the other."""
    val_path: Any = field(default=None, metadata={CHECK: data_source})
    """Held-out rows, in the same forms; null turns validation off. In PPO it also needs algorithm.val_check_interval."""
    mixture: list[MixedSourceConfig] = field(default_factory=list)
    """Instead of train_path: sources with weights, [{path: a.jsonl, weight: 3}, {path: b.jsonl}]. Every stretch of training rows
    holds them in these shares; a source that is used up starts again in a new order."""

    @property
    def training_sources(self) -> list[Any]:
        """`train_path`, or the sources of the mixture."""
        return [source.path for source in self.mixture] or [self.train_path]

    def validate_sources(self) -> None:
        """Raise UserError if training rows have no source or two, or a source is malformed."""
        if self.train_path is None and not self.mixture:
            raise UserError("data.train_path is not set: give it on the command line, data.train_path=...")
        for key, given in (("data.train_path", self.train_path), ("data.val_path", self.val_path)):
            if given not in (None, ""):  # a plan may have no prompts
                require_sources(key, given)
        for number, source in enumerate(self.mixture):
            require_sources(f"data.mixture[{number}].path", source.path)
            require(0 < source.weight < math.inf, f"data.mixture[{number}].weight", source.weight, "a number above 0")
        if self.mixture and self.train_path:
            raise UserError("data.train_path and data.mixture are both set: set data.train_path=null, or no mixture")


@dataclass
class PromptDataConfig(TrainingDataConfig, PromptRowsConfig):
    """Prompts for rollouts."""

    shuffle: bool = True
    """A new seeded permutation of the training prompts every epoch; validation prompts keep their order."""

    def validate(self) -> None:
        super().validate()
        self.validate_sources()
