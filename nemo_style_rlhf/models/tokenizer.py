"""Loads tokenizers. It works without torch: see precheck/."""

import logging
import math
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.kinds import ConfigFile
from nemo_style_rlhf.schema.model_files import without_rows
from nemo_style_rlhf.schema.paths import model_folder

log = logging.getLogger(__name__)
HUB_TIMEOUT_S = 10
"""Seconds to wait for an answer of the hub or of a proxy; the loaders themselves try for a minute."""


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of ``path``. If it has no pad token, or one for which the model has no row, it pads with the EOS (or unknown)
    token, so no embedding is added.

    Raises:
        UserError: the tokenizer is missing, or config.json and tokenizer disagree about the ids that training needs.
    """
    require_directory(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        missing = "" if Path(path).is_dir() else f"there is no folder {path}, and as a hub name "
        raise UserError(
            f"{missing}{path} holds no tokenizer that transformers can load: {first_line(error)}"
        ) from error
    rows = _require_rows(path, tokenizer)
    if tokenizer.pad_token is None or tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _require_rows(path: str, tokenizer: PreTrainedTokenizerBase) -> float:
    """Number of rows of the model's embedding, by its config.json; infinity if not stated there.

    Raises:
        UserError: the model's padding or the tokenizer's EOS has no row.
    """
    config = ConfigFile.read(path)
    if config is None or not isinstance(rows := config.get_text_config().vocab_size, int):
        return math.inf
    if isinstance(pad := config.pad_token_id, int) and pad >= rows:
        raise UserError(
            f"{path}: pad_token_id={pad} in its config.json has no row in the embedding of vocab_size={rows}: set it to null, "
            "or to the id of a token"
        )
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id >= rows:
        raise UserError(f"{path}: {without_rows(tokenizer, tokenizer.eos_token_id, rows)}")
    return rows


def require_directory(path: str) -> None:
    """Raise UserError if ``path`` is clearly a folder, but is missing or holds no model; or if it is a hub name, and one attempt
    to reach the hub fails.
    """
    if problem := model_folder(path):
        raise UserError(f"{path}: {problem}")
    if Path(path).is_dir():
        return
    try:
        if try_to_load_from_cache(path, CONFIG_NAME) is None:
            get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME), timeout=HUB_TIMEOUT_S)
            log.info("reading %s from the hub into %s", path, HF_HUB_CACHE)
    except (HFValidationError, HfHubHTTPError):
        return  # the loader reports this error, and names the file
    except (OfflineModeIsEnabled, HTTPError) as error:
        raise UserError(
            f"there is no folder {path}, and the hub cannot be asked for a model of that name ({first_line(error)}): correct "
            "the path, or download the model first where the hub can be reached"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
