"""Loads tokenizers. It works without torch: see precheck/."""

import logging
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.paths import model_folder

log = logging.getLogger(__name__)
HUB_TIMEOUT_S = 10
"""Seconds to wait for an answer of the hub or of a proxy; the loaders themselves try for a minute."""


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of ``path``. If it has no pad token, it pads with the EOS (or unknown) token, so no embedding is added."""
    require_directory(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        missing = "" if Path(path).is_dir() else f"there is no folder {path}, and as a hub name "
        raise UserError(
            f"{missing}{path} holds no tokenizer that transformers can load: {first_line(error)}"
        ) from error
    if tokenizer.pad_token is None:
        substitute = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        tokenizer.pad_token = substitute
    return tokenizer


def require_directory(path: str) -> None:
    """
    Raises:
        UserError: ``path`` is clearly a folder, but is missing or holds no model; or it is a hub name, and the hub, which is
            tried once, cannot be reached.
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
