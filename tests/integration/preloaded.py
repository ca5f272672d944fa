"""What the programs that tests fork have imported already; by its name alone, of the process they are forked from."""

import importlib
import os

from nemo_style_rlhf.launch.bootstrap import ENVIRONMENT

os.environ |= ENVIRONMENT
os.environ["DS_ACCELERATOR"] = "cpu"
for library in (
    "hydra",
    "pytorch_lightning",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "nemo_style_rlhf.ppo.run",
):
    importlib.import_module(library)
