"""Texts of tokens: the characters that each token of a sample adds."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from nemo_style_rlhf.watch.run_files import read

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, hence tokens that may share one."""
MOST_WAITING = 16
"""Tokens in a row that each end one character and begin another."""
TOKENIZER_BYTES = 256 * 2**20
log = logging.getLogger(__name__)
BROKEN = "\ufffd"


def load_tokenizer(rollouts: Path) -> Tokenizer | None:
    """The tokenizer next to the rollouts; None if it is damaged or missing, as for a tokenizer of another kind."""
    path = rollouts / "tokenizer.json"
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _loaded(path: Path, _changed: int) -> Tokenizer | None:
    content = read(path, path.parent.parent, most=TOKENIZER_BYTES)
    try:
        return Tokenizer.from_buffer(content)
    except Exception:  # noqa: BLE001 the library has no class of its own for a damaged file
        log.warning("%s is damaged: the page shows ids in place of texts", path)
        return None


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | None]:
    """The text that each token adds; together they are the whole text.

    None for a token that ends within a character: the character stands at the token that completes it. Bytes that are part
    of no character appear as U+FFFD.
    """
    texts: list[str | None] = []
    context = waiting = 0  # the first token that is decoded for its neighbors' sake, and the first whose text is due
    for end, token in enumerate(ids, start=1):
        if not _known(tokenizer, token):
            texts[waiting:] = [BROKEN] * (end - 1 - waiting)
            texts.append(f"<{token}>")
            context = waiting = end
            continue
        texts.append(None)
        added = _added(tokenizer, ids, context, waiting, end)
        if not added.endswith(BROKEN):
            broken = min(len(added) - len(added.lstrip(BROKEN)), end - 1 - waiting)
            texts[waiting : waiting + broken] = added[:broken]
            texts[-1] = added[broken:]
            context, waiting = waiting, end
        elif end - waiting >= (LONGEST_CHARACTER if not added.strip(BROKEN) else MOST_WAITING):
            texts[waiting] = BROKEN  # the first of them does not begin a character, one of the others may
            context, waiting = waiting, waiting + 1
    texts[waiting:] = [BROKEN] * (len(texts) - waiting)  # the sample ends within a character
    return texts


def _added(tokenizer: Tokenizer, ids: Sequence[int], context: int, waiting: int, end: int) -> str:
    """The text of tokens ``waiting`` to ``end``. The context keeps decoders from dropping the space before a first word.

    The library's DecodeStream does the same, but fails on bytes that are not text, and a model in training samples them.
    """
    before: str = tokenizer.decode(ids[context:waiting], skip_special_tokens=False) if context < waiting else ""
    text: str = tokenizer.decode(ids[context:end], skip_special_tokens=False)
    if text.startswith(before):
        return text[len(before) :]
    alone: str = tokenizer.decode(ids[waiting:end], skip_special_tokens=False)
    return alone


def special_tokens(tokenizer: Tokenizer) -> set[int]:
    """Ids of tokens that stand for no text, such as the end of a sequence."""
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _known(tokenizer: Tokenizer, token: int) -> bool:
    """True if the tokenizer has the token: a model may have more ids."""
    return tokenizer.id_to_token(token) is not None
