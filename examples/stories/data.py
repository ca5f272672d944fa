"""Prompts cut from TinyStories, and preference pairs of a model's own continuations ranked by the VADER lexicon."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

HELD_OUT_STORIES = 256
PROMPT_WORDS = (6, 16)
_WORD = re.compile(r"[a-z']+")


def load_lexicon(path: Path) -> dict[str, float]:
    """Word to mean valence, -4 (most negative) to 4."""
    lexicon = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, valence = line.split("\t")[:2]
        lexicon[word] = float(valence)
    return lexicon


def valence(text: str, lexicon: Mapping[str, float]) -> float:
    """Sum of the lexicon's values over the lower-cased words of ``text``; unknown words count 0."""
    return sum(lexicon.get(word, 0.0) for word in _WORD.findall(text.lower()))


def cut_prompts(stories: Path, rng: random.Random, cuts_per_story: int) -> tuple[list[str], list[str]]:
    """Beginnings of stories, 6 to 16 words long: for training, and one each of stories held out."""
    texts = [json.loads(line)["text"] for line in stories.read_text(encoding="utf-8").splitlines()]
    texts = [text for text in texts if len(text.split()) > PROMPT_WORDS[1]]
    rng.shuffle(texts)
    held_out = [_beginning(text, rng) for text in texts[:HELD_OUT_STORIES]]
    known = {_beginning(text, rng) for text in texts[HELD_OUT_STORIES:] for _ in range(cuts_per_story)}
    return sorted(known - set(held_out)), held_out


def rank(prompts: Sequence[str], responses: Sequence[str], lexicon: Mapping[str, float]) -> list[dict[str, str]]:
    """Every pair of responses to one prompt, the one of higher valence chosen; ties are dropped."""
    by_prompt: dict[str, list[tuple[float, str]]] = {}
    for prompt, response in zip(prompts, responses, strict=True):
        by_prompt.setdefault(prompt, []).append((valence(response, lexicon), response))
    pairs = []
    for prompt, scored in by_prompt.items():
        for first, second in combinations(scored, 2):
            if first[0] != second[0]:
                better, worse = (first, second) if first[0] > second[0] else (second, first)
                pairs.append({"prompt": prompt, "chosen": better[1], "rejected": worse[1]})
    return pairs


def write_jsonl(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _beginning(text: str, rng: random.Random) -> str:
    """Whole words; the text is cut, not rebuilt, so its spacing stays."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    return text[: ends[rng.randint(*PROMPT_WORDS) - 1]]
