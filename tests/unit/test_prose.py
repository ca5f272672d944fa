"""Phrases that readers stumble over stay rare: at most a third of what there was when they were first counted."""

from tests.prose import counts
from tests.support.paths import ROOT

AT_MOST = {
    "a relative clause after a comma": 121,
    "that of, those of": 39,
    "X is no Y": 30,
    "beside": 40,
    "alone": 44,
    "goes on": 23,
    "Have X do": 11,
    "whoever, nobody, somebody": 15,
    "Of, as a beginning": 4,
    "a question as a beginning": 33,
    "a section as a beginning": 34,
}


def test_phrases_that_readers_stumble_over_stay_rare() -> None:
    found = counts(ROOT)
    assert found.keys() == AT_MOST.keys()
    assert {name: count for name, count in found.items() if count > AT_MOST[name]} == {}
