"""Generates responses in a separate process for each checkpoint, since the end of a process frees all memory. No engine promises
that for its shutdown. It imports no torch, so that the processes' libraries load while the evaluation's own do."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.collector import importing
from nemo_style_rlhf.launch.environment import has_nvidia
from nemo_style_rlhf.processes.child import end_with_parent
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

if TYPE_CHECKING:
    from nemo_style_rlhf.data.prompts import Prompt
    from nemo_style_rlhf.evaluation.samples import Sample


START_METHOD = "spawn" if has_nvidia() else "fork"
"""A CUDA context does not survive a fork, and a library may have made one while it was imported."""


class ChildSampler:
    """One process loads the libraries, and forks for every checkpoint. It computes nothing itself, and it is spawned: threads do
    not survive a fork. With GPUs every checkpoint's process loads the libraries for itself."""

    def __init__(self, config: EvaluationConfig) -> None:
        interrupt.keep_from_children()
        others = multiprocessing.active_children()
        self._stem = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
        self._loading = self._stem.submit(_load, config.generation)
        self._processes = [process for process in multiprocessing.active_children() if process not in others]

    def sample(self, checkpoint: Checkpoint, config: EvaluationConfig, prompts: Sequence["Prompt"]) -> list["Sample"]:
        """:func:`sampling.sample` in a new process. The process has ended when this returns.

        Raises:
            UserError: the checkpoint cannot be loaded, or the process was killed.
        """
        try:
            self._loading.result()
            return self._stem.submit(_sample, checkpoint, config, prompts).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"the process that generated with {checkpoint.path} was killed, most often for lack of memory: lower "
                "generation.max_num_seqs, generation.kv_cache_gib or generation.gpu_memory_utilization"
            ) from error

    def close(self) -> None:
        for process in self._processes:  # it may still be loading
            process.kill()
        self._stem.shutdown(cancel_futures=True)


def _load(generation: GenerationConfig) -> None:
    if START_METHOD != "fork":
        return
    with importing():
        from nemo_style_rlhf.evaluation import sampling  # noqa: F401
        from nemo_style_rlhf.generation.factory import load_libraries
        from nemo_style_rlhf.launch.bootstrap import silence_libraries
    silence_libraries()
    load_libraries(generation)


def _sample(checkpoint: Checkpoint, config: EvaluationConfig, prompts: Sequence["Prompt"]) -> list["Sample"]:
    from nemo_style_rlhf.evaluation.sampling import sample

    with ProcessPoolExecutor(1, multiprocessing.get_context(START_METHOD), initializer=end_with_parent) as child:
        return child.submit(sample, checkpoint, config, prompts).result()
