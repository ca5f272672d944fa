"""The prompts of a PPO run, and how they become tokens."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, require_choice
from nemo_style_rlhf.schema.paths import CHECK, data_source
from nemo_style_rlhf.schema.templates import PLACEHOLDER, chat_template_text, prompt_template_text

PROMPT_FORMATS = ("text", "messages", "hh")


@dataclass
class PromptTemplateConfig:
    """How the text of a prompt is wrapped before it is tokenized."""

    prompt_template: str | None = None
    """Text around the prompt, e.g. "Question: {prompt}\\nAnswer:", or @file; null leaves prompts as they are."""
    chat_template: str | None = None
    """A Jinja chat template for `messages`: a file (its path, or @path) or the text itself; null uses the tokenizer's own. The
    model is exported with it."""
    input_key: str | None = None
    """Column whose text, if not empty, follows the prompt after a blank line (`input` of Alpaca); null for none."""
    on_template_mismatch: str = "refuse"
    """refuse or warn if the model was trained with another prompt or chat template, or the critic server's reward model with
    another prompt template; SFT may change them and does neither."""

    def validate(self) -> None:
        """Replace both templates by the texts of their files, which thus become part of the configuration."""
        require_choice("data.on_template_mismatch", self.on_template_mismatch, ("refuse", "warn"))
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
    """How rows are read as prompts."""

    format: str = "text"
    """text (a string), messages (a list of {role, content}) or hh (an Anthropic-HH transcript). Transcripts, and messages that
    end with an answer, are cut before it."""
    prompt_key: str | None = None
    """Column of the prompt; null is `prompt` for text, `messages` for messages, `chosen` for hh."""
    label_key: str | None = None
    """Column of the reference answer, which reward functions get; null for none."""
    sampling_key: str | None = None
    """Column of a row's own sampling settings: an object of temperature, top_p, top_k, min_length, max_length, stop and
    stop_token_ids, which override generation's; null for none."""
    max_prompt_length: int = 1024
    """Maximum tokens of a prompt; longer prompts are dropped and counted, never cut."""

    @property
    def key(self) -> str:
        """`prompt_key`, or the format's usual one."""
        return self.prompt_key or {"text": "prompt", "messages": "messages", "hh": "chosen"}[self.format]

    def validate(self) -> None:
        super().validate()
        require_choice("data.format", self.format, PROMPT_FORMATS)
        if self.input_key is not None and self.format != "text":
            raise UserError(
                f"data.input_key is set but data.format={self.format} does not read it: set data.format=text"
            )
        require(
            self.max_prompt_length > 0, "data.max_prompt_length", self.max_prompt_length, "a number of tokens above 0"
        )
        if self.prompt_template is not None and self.format == "messages":
            raise UserError(
                "data.prompt_template is set but data.format=messages takes a chat template: set data.chat_template instead"
            )
        if self.chat_template is not None and self.format != "messages":
            raise UserError(
                f"data.chat_template is set but data.format={self.format} uses none: set data.format=messages"
            )


@dataclass
class PromptDataConfig(PromptRowsConfig):
    """Prompts for rollouts: JSONL, JSONL.gz, Parquet, or anything the `datasets` library loads."""

    train_path: str = field(default=MISSING, metadata={CHECK: data_source})
    """A .jsonl, .jsonl.gz or .parquet file, a folder written by `datasets`, or a hub name (`owner/name:split`)."""
    val_path: str | None = field(default=None, metadata={CHECK: data_source})
    """Held-out prompts, in the same forms; null turns validation rollouts off. They also need algorithm.val_check_interval."""
    shuffle: bool = True
    """A new seeded permutation of the training prompts every epoch; validation prompts keep their order."""
