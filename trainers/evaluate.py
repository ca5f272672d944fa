"""Compare checkpoints on the same prompts: python trainers/evaluate.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.evaluation import EvaluationConfig


@entry_point(EvaluationConfig, config_name="evaluate")
def main(config: EvaluationConfig) -> None:
    """Everything else is in evaluation/run.py."""
    from nemo_style_rlhf.checkpoint.owner import owned

    with owned(config.run, "evaluation"):
        from nemo_style_rlhf.evaluation.run import evaluate

        evaluate(config)


if __name__ == "__main__":
    main()
