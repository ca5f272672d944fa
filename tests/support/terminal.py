"""Lines that a normal run may print. Any other line is noise, of a library or of ours."""

import re

STAMP = r"\d\d:\d\d:\d\d INFO "
PATH = r"/\S+"
KNOWN = [
    "",
    rf"{STAMP}([\w-]+: )?{PATH}: \d+ rows.*",
    rf"{STAMP}.+: \d+ steps of \d+ (rows|samples).* on (cpu|cuda:\d+); .* go to {PATH}",
    rf"{STAMP}trained \d+ steps( val/.*)?",
    rf"{STAMP}exported (the policy )?to {PATH}(; next: .*)?",
    rf"{STAMP}next: .*",
    rf"{STAMP}waiting for the critic server at \S+, \d+ s left; start it with .*",
    rf"{STAMP}serving .* at https?://\S+, boot id \w+(; next: .*)?",
    rf"{STAMP}train step \d+: \d+ sequences in \S+ s, loss \S+, explained variance \S+",
    rf"{STAMP}received SIGTERM",
    rf"{STAMP}[\w-]+: \d+ responses, \d+ tokens in \d+ s",
    rf"{STAMP}dry run: .*",
    rf"{STAMP}starting: .*",
    rf"{STAMP}.+ does not answer yet: the policy and its generator load meanwhile",
    r"(PPO|SFT|reward model|DPO|KTO) \d+/\d+  .*eta \d+:\d\d",
]
"""Regular expressions of whole lines."""


def unknown_lines(output: str, *more: str) -> list[str]:
    """The lines of ``output`` that neither :data:`KNOWN` nor ``more`` describes."""
    expected = re.compile("|".join(f"(?:{line})" for line in [*KNOWN, *more]))
    return [line for line in output.splitlines() if not expected.fullmatch(line)]
