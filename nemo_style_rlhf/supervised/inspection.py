"""Shows training samples as the model sees them: every token, and the loss tokens among them."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, PreTrainedTokenizerBase

from nemo_style_rlhf.data.examples import PreferencePair, SFTExample
from nemo_style_rlhf.data.mixtures import load_training_rows
from nemo_style_rlhf.data.records import DropReport
from nemo_style_rlhf.data.supervised import load_pairs, load_sft, load_unpaired
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.scalar import sequence_scores
from nemo_style_rlhf.schema.inspection import InspectDataConfig
from nemo_style_rlhf.schema.sources import Sources

OPEN, CLOSE, BORDER = "⟦", "⟧", "│"
SPECIAL_OPEN, SPECIAL_CLOSE = "⟨", "⟩"
VISIBLE = {" ": "·", "\n": "⏎\n", "\t": "→\t", "\r": "␍"}
STYLES = {"learned": "bold green", "read": "", "special": "magenta", "border": "bright_black", "heading": "bold"}
EXCERPT = 200
"""Maximum number of characters shown of a dropped row."""
Loader = Callable[[Sources, Any, PreTrainedTokenizerBase], tuple[Sequence[Any], DropReport]]
LOADERS: dict[str, Loader] = {"sft": load_sft, "reward_model": load_pairs, "dpo": load_pairs, "kto": load_unpaired}


@dataclass(frozen=True)
class Shown:
    """One text of a sample."""

    heading: str
    token_ids: Sequence[int]
    learned: Sequence[bool]
    """True for each loss token."""


def inspect_data(config: InspectDataConfig) -> None:
    """Print the first training samples, and the dropped rows of each source.

    Raises:
        UserError: training would refuse the tokenizer or the data.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal without Unicode
    console = Console(highlight=False)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    load, data = LOADERS[config.stage], config.stage_data
    training = load_training_rows(data, lambda sources, _: load(sources, data, tokenizer))
    pad_token_id = _pad_token_id(config, tokenizer) if config.stage == "reward_model" else None
    samples = [_sample(row, config, pad_token_id) for row in training.rows]
    tokens = TokenTexts(tokenizer)
    console.print(_legend(config.stage), soft_wrap=True)
    for number, texts in enumerate(samples[: config.num_samples], start=1):
        console.print(Text(f"\nSample {number} of {len(samples)}", STYLES["heading"]))
        for shown in texts:
            learned = sum(shown.learned)
            console.print(Text(f"{shown.heading}: {len(shown.token_ids)} tokens, {learned} {_verb(config.stage)}"))
            console.print(render(shown, tokens), soft_wrap=not console.is_terminal)
    console.print()
    console.print(Text(_statistics(samples, config.stage)))
    for report in training.reports:
        _print_report(console, report)
    if config.data.val_path:
        _, report = load(config.data.val_path, data, tokenizer)
        _print_report(console, report)


class TokenTexts:
    """Maps a token id to the text to show."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        # A tokenizer decodes the space before a token only after another token.
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
        self._before = self._text_of(self._anchor)

    def __call__(self, token_id: int) -> tuple[str, bool]:
        """The token's text with visible white space, and whether it is a special token.

        A token that is only part of a character has no text, so its form in the vocabulary is shown.
        """
        if token_id in self._special:
            return f"{SPECIAL_OPEN}{self._tokenizer.convert_ids_to_tokens(token_id)}{SPECIAL_CLOSE}", True
        text = self._text_of([*self._anchor, token_id])
        if not text.startswith(self._before) or "\ufffd" in text:
            return str(self._tokenizer.convert_ids_to_tokens(token_id)), False
        return "".join(VISIBLE.get(character, character) for character in text.removeprefix(self._before)), False

    def _text_of(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render(shown: Shown, tokens: TokenTexts) -> Text:
    """Tokens with a border between them, loss tokens in brackets: the brackets repeat the information of the colors."""
    result = Text()
    previous = False
    for position, (token_id, learned) in enumerate(zip(shown.token_ids, shown.learned, strict=True)):
        if previous and not learned:
            result.append(CLOSE, STYLES["learned"])
        if position:
            result.append(BORDER, STYLES["border"])
        if learned and not previous:
            result.append(OPEN, STYLES["learned"])
        text, special = tokens(token_id)
        style = "learned" if learned else "read"
        result.append(text, f"{STYLES[style]} {STYLES['special']}" if special else STYLES[style])
        previous = learned
    if previous:
        result.append(CLOSE, STYLES["learned"])
    return result


def scored_token(token_ids: Sequence[int], pad_token_id: int | None) -> list[bool]:
    """Mark the token whose score is the reward."""
    positions = torch.arange(len(token_ids), dtype=torch.float32)[None]
    where = sequence_scores(positions, torch.tensor([list(token_ids)]), torch.tensor([len(token_ids)]), pad_token_id)
    return [position == int(where) for position in range(len(token_ids))]


def _sample(row: Any, config: InspectDataConfig, pad_token_id: int | None) -> list[Shown]:
    if not isinstance(row, PreferencePair):
        judged = {True: "desirable", False: "undesirable", None: "text"}[getattr(row, "desirable", None)]
        return [Shown(judged, row.token_ids, row.learned())]
    if config.stage == "reward_model":
        return [
            Shown(side, ids, scored_token(ids, pad_token_id))
            for side, ids in (("chosen", row.chosen), ("rejected", row.rejected))
        ]
    return [
        Shown(side, ids, SFTExample(ids, row.prompt_length).learned())
        for side, ids in (("chosen", row.chosen), ("rejected", row.rejected))
    ]


def _pad_token_id(config: InspectDataConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The pad token id as training sets it: the model's own, or the tokenizer's."""
    own = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code).pad_token_id
    return tokenizer.pad_token_id if own is None else own


def _verb(stage: str) -> str:
    return "scored" if stage == "reward_model" else "learned"


def _legend(stage: str) -> Text:
    meaning = {
        "sft": "learned",
        "reward_model": "where the reward is read",
        "dpo": "its log-probability counts",
        "kto": "its log-probability counts",
    }[stage]
    return Text.assemble(
        (f"{OPEN}token{CLOSE}", STYLES["learned"]), f" {meaning}   token", (BORDER, STYLES["border"]), "token a border   ",
        (f"{SPECIAL_OPEN}token{SPECIAL_CLOSE}", STYLES["special"]), " special   · space   ⏎ newline   → tab",
    )  # fmt: skip


def _statistics(samples: Sequence[Sequence[Shown]], stage: str) -> str:
    texts = [shown for sample in samples for shown in sample]
    lengths = [len(shown.token_ids) for shown in texts]
    line = f"{len(texts)} texts: {fmean(lengths):.1f} tokens on average, {min(lengths)} to {max(lengths)}"
    if stage == "reward_model":
        return line
    return f"{line}; {sum(sum(shown.learned) for shown in texts) / sum(lengths):.0%} of the tokens are learned"


def _print_report(console: Console, report: DropReport) -> None:
    dropped = report.dropped.total()
    console.print(Text(f"{report.source}: {report.kept} rows kept, {dropped} dropped"), soft_wrap=True)
    for reason, count in report.dropped.most_common():
        console.print(Text(f"  {count} {reason}, first of them:", STYLES["heading"]))
        for record in report.examples[reason]:
            text = json.dumps(record.fields, ensure_ascii=False, default=str)
            excerpt = text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"
            console.print(Text(f"    {record.where}: {excerpt}"), soft_wrap=True)
