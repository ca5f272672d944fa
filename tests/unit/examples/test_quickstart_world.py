"""The quickstart's text world: generator, recogniser and gold rule agree."""

import importlib.util
import random

import pytest

from tests.support.paths import ROOT

WORLD = ROOT / "examples" / "quickstart" / "world.py"


@pytest.fixture(scope="module")
def world():
    import sys

    spec = importlib.util.spec_from_file_location("quickstart_world", WORLD)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reviews(world):
    rng = random.Random(0)
    prompts = world.prompts(rng)
    sides = (world.PLEASANT, world.UNPLEASANT)
    return [world.write_review(rng.choice(prompts), side, rng) for side in sides for _ in range(500)]


def test_every_review_is_grammatical_and_the_gold_rule_finds_its_side(world, reviews):
    for review in reviews:
        text = review.prompt + review.response
        assert world.is_grammatical(text), text
        assert world.is_pleasant(text) == (review.sentiment == world.PLEASANT), text


def test_reviews_are_diverse_and_prompts_distinct(world, reviews):
    assert len({review.response for review in reviews}) == len(reviews)
    prompts = world.prompts(random.Random(0))
    assert len(set(prompts)) == len(prompts) == 1024


def test_damaged_reviews_are_not_grammatical(world, reviews):
    named = next(review for review in reviews if f"The {review.prompt.split()[4]} " in review.response)
    wrong_product = "lamp" if named.prompt.split()[4] != "lamp" else "tent"
    for text in (
        named.prompt,
        named.prompt + named.response[:-1],  # no full stop
        named.prompt + named.response[1:],  # no space
        named.prompt + named.response + named.response,
        named.prompt + named.response.replace(named.prompt.split()[4], wrong_product),
    ):
        assert not world.is_grammatical(text), text


def test_mixing_sides_is_not_grammatical(world):
    fact = "It came in a flat box after nine days."
    prompt = "Review of the red lamp from Corvo:"
    good = f"{prompt} {fact} The lamp is sturdy and its lid looks handy. We loved it."
    assert world.is_grammatical(good) and world.is_pleasant(good)
    mixed = good.replace("handy", "shabby").replace("loved", "hated")
    assert not world.is_grammatical(mixed) and not world.is_pleasant(mixed)
