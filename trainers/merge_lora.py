"""Merge a LoRA adapter into its base model: python trainers/merge_lora.py --help"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.entry import refuse


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Merge a LoRA adapter into the model it was trained from: a plain Hugging Face directory."
    )
    parser.add_argument("adapter", help="a folder with adapter_config.json, such as <run.output_dir>/export_adapter")
    parser.add_argument("target", type=Path, help="where the merged model goes")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the base model"
    )
    arguments = parser.parse_args()

    from nemo_style_rlhf.models.lora import merge_adapter

    try:
        merge_adapter(arguments.adapter, arguments.target, trust_remote_code=arguments.trust_remote_code)
    except UserError as error:
        refuse(str(error))


if __name__ == "__main__":
    main()
