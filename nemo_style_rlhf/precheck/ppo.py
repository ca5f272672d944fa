"""Checks of a PPO run's prompts and models, and of an evaluation's."""

from collections.abc import Callable, Sequence

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.preview import Reader, count_rows, first_rows
from nemo_style_rlhf.data.prompts import Prompt, prompt_reader
from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.data.template_files import check_template
from nemo_style_rlhf.ppo.limits import max_sequence_length, number_of_steps, prompts_needed
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.data import PromptRowsConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.model_files import rows_of

Read = Callable[[Record], tuple[Prompt, bool]]


def check_prompts(config: PPOActorConfig) -> None:
    """Check what needs no tokenizer."""
    data, needed = config.data, prompts_needed(config)
    reader = _reader(data)
    number_of_steps(config, sum(count_rows(each, reader, enough=needed) for each in data.training_sources))
    if data.val_path:
        count_rows(data.val_path, reader)


def check_tokens(config: PPOActorConfig) -> None:
    """Check the first rows with the tokenizer; runs without torch."""
    from transformers import AutoConfig

    from nemo_style_rlhf.models.tokenizer import load_tokenizer

    data, path, own_code = config.data, config.model.path, config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=own_code)
    encoder = Encoder(tokenizer, chat_template=data.chat_template, today=data.today, rows=rows_of(tokenizer))
    reader = _reader(data, whole_distribution=config.algorithm.old_logprobs == "sampler")
    parts = [first_rows(source, reader, encoder) for source in data.training_sources]
    prompts = [prompt for rows, _ in parts for prompt, _ in rows]
    val_prompts = first_rows(data.val_path, _reader(data), encoder)[0] if data.val_path else []
    if all(whole for _, whole in parts):
        number_of_steps(config, len(prompts))
    if longest := [*prompts, *(prompt for prompt, _ in val_prompts)]:
        max_sequence_length(config, longest, AutoConfig.from_pretrained(path, trust_remote_code=own_code))
    check_template(path, data, tokenizer)


def check_evaluation_prompts(config: EvaluationConfig) -> None:
    """Check what needs no tokenizer."""
    count_rows(config.data.path, _reader(config.data))


def check_evaluation_tokens(config: EvaluationConfig) -> None:
    """Check the first rows with the checkpoints' tokenizers; runs without torch."""
    from nemo_style_rlhf.evaluation.prompts import common_prompts, fitting_tokenizer

    loaded: dict[str, list[Prompt]] = {}
    everything = True
    for checkpoint in config.parsed_checkpoints:
        encoder = Encoder(
            fitting_tokenizer(checkpoint, config), chat_template=config.data.chat_template, today=config.data.today
        )
        rows, whole = first_rows(config.data.path, _reader(config.data), encoder)
        loaded[checkpoint.name], everything = [prompt for prompt, _ in rows], everything and whole
    if everything or set.intersection(*({prompt.prompt_id for prompt in each} for each in loaded.values())):
        common_prompts(config, loaded)


def _reader(config: PromptRowsConfig, *, whole_distribution: bool = False) -> Reader[tuple[Prompt, bool]]:
    def reader(_: Sequence[Record], encoder: Encoder) -> Read:
        return prompt_reader(config, encoder, whole_distribution=whole_distribution)

    return reader
