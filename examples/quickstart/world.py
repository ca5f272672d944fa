"""A small text world: product reviews from a template grammar, half of them pleasant and half unpleasant.

The same templates generate reviews and, compiled into one regular expression, recognize them. A review is pleasant or
unpleasant as a whole; it may concede a point to the other side ("Its lid is flimsy, but ..."). The gold rule
:func:`is_pleasant` counts words and is used for evaluation only.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

PLEASANT, UNPLEASANT = "pleasant", "unpleasant"

PROMPT = "Review of the {colour} {product} from {brand}:"
OPENINGS = (
    "{person} bought it {time} for the {room}.",
    "{person} ordered it {time} from {shop}.",
    "It came in a {size} box after {number} days.",
    "It weighs {number} pounds with the {part}.",
)
# "+" takes a word of the review's own side, "-" one of the other side.
JUDGEMENTS = (
    "The {product} {seems} {degree} {+quality}.",
    "Its {part} {seems} {+quality} and {+quality}.",
    "The {product} {seems} {+quality} and its {part} {seems} {+quality}.",
    "Its {part} {seems} {-quality}, but the {product} {seems} {+quality} and {+quality}.",
)
VERDICTS = (
    "{person} {+verdict} it.",
    "All in all it is {+closing}.",
    "{person} {+verdict} it and called it {+closing}.",
)
LAYOUTS = (
    (OPENINGS, JUDGEMENTS, VERDICTS),
    (JUDGEMENTS, OPENINGS, VERDICTS),
)

SLOTS: dict[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "black", "white", "yellow", "grey", "brown"),
    "product": (
        *("kettle", "lamp", "chair", "clock", "radio", "blender", "backpack", "tent"),
        *("bicycle", "camera", "toaster", "printer", "umbrella", "guitar", "heater", "scooter"),
    ),
    "brand": ("Arden", "Borealis", "Corvo", "Delmar", "Evergreen", "Falkner", "Gimble", "Harrow"),
    "person": (
        *("I", "We", "My sister", "My brother", "My uncle", "My aunt"),
        *("Our teacher", "Our landlord", "Our neighbour", "Our boss"),
    ),
    "time": (
        *("last spring", "last summer", "last autumn", "last winter"),
        *("in January", "in March", "in May", "in October"),
    ),
    "room": ("office", "garden", "kitchen", "school", "workshop", "cabin", "library", "studio"),
    "shop": ("a catalogue", "a warehouse", "a factory", "a market", "a website"),
    "size": ("small", "large", "flat", "plain", "wooden", "square"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "part": ("handle", "lid", "cable", "frame", "cover", "base", "switch", "strap"),
    "seems": ("is", "looks", "feels", "seems"),
    "degree": ("really", "very", "quite", "rather", "truly"),
}
QUALITIES = {
    PLEASANT: ("elegant", "sturdy", "reliable", "lovely", "comfortable", "handy"),
    UNPLEASANT: ("ugly", "flimsy", "useless", "noisy", "clumsy", "shabby"),
}
VERDICT_VERBS = {
    PLEASANT: ("loved", "enjoyed", "praised", "recommended"),
    UNPLEASANT: ("hated", "regretted", "returned", "disliked"),
}
CLOSINGS = {
    PLEASANT: ("a good buy", "a joy to use", "worth the money"),
    UNPLEASANT: ("a bad buy", "a pain to use", "a waste of money"),
}
POLAR = {"quality": QUALITIES, "verdict": VERDICT_VERBS, "closing": CLOSINGS}
GOLD_WORDS = {
    PLEASANT: {*QUALITIES[PLEASANT], *VERDICT_VERBS[PLEASANT], "good", "joy", "worth"},
    UNPLEASANT: {*QUALITIES[UNPLEASANT], *VERDICT_VERBS[UNPLEASANT], "bad", "pain", "waste"},
}

_SLOT = re.compile(r"\{([+-]?\w+)\}")
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Review:
    """One review; ``response`` begins with the space that follows the prompt's colon."""

    prompt: str
    response: str
    sentiment: str


def other(sentiment: str) -> str:
    """The opposite side."""
    return UNPLEASANT if sentiment == PLEASANT else PLEASANT


def prompts(rng: random.Random) -> list[str]:
    """Every prompt of the world, shuffled: 1,024 of them."""
    every = [
        _expand(PROMPT, {"colour": colour, "product": product_, "brand": brand}.__getitem__)
        for colour, product_, brand in product(SLOTS["colour"], SLOTS["product"], SLOTS["brand"])
    ]
    rng.shuffle(every)
    return every


def write_review(prompt: str, sentiment: str, rng: random.Random) -> Review:
    """A random review of the product that ``prompt`` names."""
    named = next(word for word in prompt.rstrip(":").split() if word in SLOTS["product"])

    def choose(slot: str) -> str:
        return named if slot == "product" else rng.choice(_fillers(slot, sentiment))

    sentences = [_expand(rng.choice(options), choose) for options in rng.choice(LAYOUTS)]
    return Review(prompt, "".join(f" {sentence}" for sentence in sentences), sentiment)


def is_grammatical(text: str) -> bool:
    """True if ``text`` (prompt and response) is a complete review of the grammar: one product, one side throughout."""
    return _GRAMMAR.fullmatch(text) is not None


def is_pleasant(text: str) -> bool:
    """The gold rule: more pleasant words than unpleasant ones."""
    words = _WORD.findall(text.lower())
    return sum(word in GOLD_WORDS[PLEASANT] for word in words) > sum(word in GOLD_WORDS[UNPLEASANT] for word in words)


def _fillers(slot: str, sentiment: str) -> tuple[str, ...]:
    if slot[0] not in "+-":
        return SLOTS[slot]
    side = sentiment if slot[0] == "+" else other(sentiment)
    return POLAR[slot[1:]][side]


def _expand(template: str, fill: Callable[[str], str], literal: Callable[[str], str] = str) -> str:
    """``template`` with every slot replaced by ``fill(slot)`` and the text between slots by ``literal(text)``."""
    pieces = _SLOT.split(template)  # text, slot, text, slot, ..., text
    return "".join(fill(piece) if index % 2 else literal(piece) for index, piece in enumerate(pieces))


def _compile_grammar() -> re.Pattern[str]:
    def one_of(alternatives: list[str]) -> str:
        return f"(?:{'|'.join(alternatives)})"

    def pattern(template: str, sentiment: str) -> str:
        def fill(slot: str) -> str:
            if slot == "product":
                return "(?P=product)"
            return one_of([re.escape(word) for word in _fillers(slot, sentiment)])

        return _expand(template, fill, re.escape)

    def layout(parts: tuple[tuple[str, ...], ...], sentiment: str) -> str:
        return "".join(" " + one_of([pattern(template, sentiment) for template in options]) for options in parts)

    def head(slot: str) -> str:
        return f"(?P<{slot}>{'|'.join(SLOTS[slot])})"

    reviews = [layout(parts, sentiment) for sentiment in (PLEASANT, UNPLEASANT) for parts in LAYOUTS]
    return re.compile(_expand(PROMPT, head, re.escape) + one_of(reviews))


_GRAMMAR = _compile_grammar()
