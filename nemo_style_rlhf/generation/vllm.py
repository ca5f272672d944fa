"""vLLM inside this process."""

import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from nemo_style_rlhf.distributed.alone import init_alone
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation import cpu_batches, cpu_generators, cpu_kernels, vllm_worker
from nemo_style_rlhf.generation.in_process import Finished, InProcessGenerator
from nemo_style_rlhf.generation.interface import GenerationRequest, TransferError
from nemo_style_rlhf.launch.collector import leaving_garbage
from nemo_style_rlhf.launch.malloc import forget
from nemo_style_rlhf.schema.generation import CPU_KV_CACHE_GIB, GenerationConfig

log = logging.getLogger(__name__)


class VLLMGenerator(InProcessGenerator):
    """A `vllm.LLM` that streams finished samples and takes new weights.

    Build it after DeepSpeed's process group and engine exist.
    """

    def __init__(
        self, model_path: str, config: GenerationConfig, *, dtype: str, seed: int, max_model_len: int,
        eos_token_ids: Sequence[int], weight_shapes: dict[str, tuple[int, ...]], stop_strings: bool = False,
        trust_remote_code: bool = False, sleeps: bool = False,
    ) -> None:  # fmt: skip
        """Load ``model_path``; ``weight_shapes`` names the tensors that every update must bring.

        Args:
            stop_strings: True if prompts may have their own stop strings.
            sleeps: True if :meth:`sleep` will be called. On a GPU vLLM needs an allocator of its own for that.
        """
        from vllm import LLM  # type: ignore[import-not-found]

        super().__init__(weight_shapes)
        _describe_models_in_this_process()
        if _ranks() == config.tensor_parallel_size == 1:
            init_alone("nccl" if torch.cuda.is_available() else "gloo")
        _leave_the_trainer_its_process_group()
        self._knows_text = bool(config.stop or stop_strings)
        if _ranks() > 1 and not torch.cuda.is_available():
            _unlink_segment(config.tensor_parallel_size)
        self._workers_apart = _ranks() == 1 and config.tensor_parallel_size > 1
        if self._workers_apart:
            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # of each of them
        if not config.compiles:
            _leave_transformers_alone()
        try:
            self._llm = LLM(
                model=model_path,
                trust_remote_code=trust_remote_code,
                dtype=dtype,
                seed=seed,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                gpu_memory_utilization=config.gpu_memory_utilization,
                kv_cache_memory_bytes=_kv_cache_bytes(config),
                # vLLM's CPU attention computes whole blocks: for short sequences, the default of 128 is mostly padding.
                block_size=None if torch.cuda.is_available() else 32,
                tensor_parallel_size=config.tensor_parallel_size,
                # The launcher started the ranks: vLLM joins them, each on its own device, neighboring ranks as one engine.
                distributed_executor_backend="external_launcher" if _ranks() > 1 else None,
                worker_extension_cls=f"{vllm_worker.__name__}.{vllm_worker.VllmWorker.__name__}",
                enforce_eager=not config.compiles,
                # FlashAttention 3 adds in another order when a prompt is read in the same batch.
                attention_backend="TRITON_ATTN" if _batch_invariant() else None,
                logprobs_mode="processed_logprobs",  # under the sampled distribution, after the temperature
                generation_config="vllm",  # not the checkpoint's own sampling defaults
                disable_log_stats=True,
                use_tqdm_on_load=False,
                skip_tokenizer_init=not self._knows_text,  # token ids in, token ids out; stop strings need text
                async_scheduling=False,
                enable_sleep_mode=sleeps and torch.cuda.is_available(),
                sleep_mode_offload_cudagraph=sleeps and torch.cuda.is_available() and config.compiles,
                **_cpu_kernels(config),
            )
        except Exception as error:
            raise explain(error, model_path, config, max_model_len) from error
        _require_attention_kernel(self._llm, model_path)
        if not torch.cuda.is_available():
            self._llm.collective_rpc(cpu_generators.draw_for_kept_tokens_only)
            self._llm.collective_rpc(cpu_batches.compute_tokens_alike)
            if self._workers_apart:
                self._llm.collective_rpc(_unlink_own_segments)
        self._config = config
        # Without a tokenizer, vLLM does not know the end-of-sequence tokens.
        self._stop_token_ids = [*config.stop_token_ids, *([] if config.ignore_eos else eos_token_ids)]
        self._engine = self._llm.llm_engine

    def _before_first(self) -> None:
        # Cache entries of an earlier rollout would change this one's bits, and a resumed run does not have them.
        self._drop_prefix_cache()

    def _add(self, name: str, request: GenerationRequest) -> None:
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMClientError  # type: ignore[import-not-found]

        if request.sampling.stop and not self._knows_text:  # vLLM would sample on past them
            raise ValueError("stop strings need a tokenizer, which sequences.stop_strings=true has an engine load")
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
        try:
            self._engine.add_request(name, prompt, self._sampling(request))
        except VLLMClientError as error:
            raise ValueError(str(error)) from error

    def _step(self) -> list[Finished]:
        return [_finished(output) for output in self._outputs() if output.finished]

    def _abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(names)

    def _cache_in_use(self) -> float:
        usage: float = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage
        return usage

    def _replace_weights(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> None:
        """Feed the buckets to the loader of vLLM's model layer by layer; kernels repack each layer when it is complete."""
        self._llm.collective_rpc(_begin_reload)
        for bucket in buckets:
            if self._workers_apart:
                self._load_apart(bucket)
            else:
                self._llm.collective_rpc(_load_bucket, args=(bucket,))
        self._llm.collective_rpc(_finish_reload)
        self._drop_prefix_cache()  # its keys and values come from the old weights

    def _sleep(self) -> None:
        self._llm.sleep(level=2)  # without a copy: other weights follow
        if not torch.cuda.is_available():  # where vLLM only pauses
            self._llm.collective_rpc(_drop_pages)

    def _wake_weights(self) -> None:
        self._llm.wake_up(tags=["weights"])

    def _wake_cache(self) -> None:
        self._llm.wake_up(tags=["kv_cache"])

    def _load_apart(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Make worker processes map the tensors: in a call, each would get a copy through a pipe."""
        with open(os.memfd_create("weights"), "wb") as memory:
            memory.write(save({name: tensor.detach().cpu().clone() for name, tensor in bucket}))
            memory.flush()
            path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
            self._llm.collective_rpc(_load_file, args=(path, [name for name, _ in bucket]))

    def preempt(self) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _drop_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():  # vLLM only warns
            raise TransferError(
                "vLLM did not drop its prefix cache: what it computes next would mix two versions of the weights"
            )

    def _outputs(self) -> list[Any]:
        if self._config.compiles:
            return list(self._engine.step())
        # vLLM's sampler compiles a small function even in eager mode: 2 to 15 s at every start.
        with torch.compiler.set_stance("force_eager"):
            return list(self._engine.step())

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=list(sequence)) for sequence in sequences]
        for index, prompt in enumerate(prompts):
            self._engine.add_request(f"probe/{index}", prompt, params)
        logprobs: dict[str, Tensor] = {}
        while self._engine.has_unfinished_requests():
            for output in self._outputs():
                if output.finished:
                    logprobs[output.request_id] = _token_logprobs(output.prompt_logprobs, output.prompt_token_ids[1:])
        return [logprobs[f"probe/{index}"] for index in range(len(prompts))]

    def close(self) -> None:
        with leaving_garbage():
            self._engine.engine_core.shutdown()

    def _sampling(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams

        config, own = self._config, request.sampling
        stop = config.stop if own.stop is None else own.stop
        stop_token_ids = {*self._stop_token_ids, *(own.stop_token_ids or ())}
        return SamplingParams(
            temperature=config.temperature if own.temperature is None else own.temperature,
            top_p=config.top_p if own.top_p is None else own.top_p,
            top_k=config.top_k if own.top_k is None else own.top_k,
            max_tokens=request.max_tokens,
            min_tokens=min(config.min_length if own.min_length is None else own.min_length, request.max_tokens),
            stop=list(stop) or None,
            stop_token_ids=sorted(stop_token_ids) or None,
            ignore_eos=config.ignore_eos,
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(stop),
            include_stop_str_in_output=True,
        )


def _describe_models_in_this_process() -> None:
    """Make vLLM load a model's code in this process to ask what the model can do. Otherwise, unless a file in the user's cache
    knows that, it starts a process that imports all of vLLM: 6 s of CPU time at the first start."""
    from vllm.model_executor.models.registry import (  # type: ignore[import-not-found]
        _LazyRegisteredModel,
        _ModelInfo,
    )

    _LazyRegisteredModel.inspect_model_cls = lambda self: _ModelInfo.from_model_cls(self.load_model_cls())


def _leave_the_trainer_its_process_group() -> None:
    """Keep a vLLM that ends, or is freed, from ending process groups that it did not make: the trainer in this process needs
    them. vLLM's own groups stay for the next one."""
    from vllm.v1.engine import core  # type: ignore[import-not-found]

    if torch.distributed.is_initialized():
        core.cleanup_dist_env_and_memory = lambda: torch.accelerator.is_available() and torch.accelerator.empty_cache()


def _leave_transformers_alone() -> None:
    """Keep vLLM from changing transformers' own classes for torch.compile. It does so if it has no code for a family: the
    trainer's model, an instance of such a class, could not be called any more."""
    from vllm.model_executor.models.transformers.base import Base  # type: ignore[import-not-found]

    Base._decorate_cls_for_torch_compile = lambda *_, **__: None


def _batch_invariant() -> bool:
    return torch.cuda.is_available() and os.environ.get("VLLM_BATCH_INVARIANT") == "1"


def _finished(output: Any) -> Finished:
    (result,) = output.outputs
    # An array, since torch reads a list ten times more slowly.
    token_ids = torch.frombuffer(array("q", result.token_ids), dtype=torch.int64)
    reason = "length" if result.finish_reason == "length" else "stop"
    return Finished(output.request_id, token_ids, _token_logprobs(result.logprobs, result.token_ids), reason)


def _cpu_kernels(config: GenerationConfig) -> dict[str, Any]:
    """vLLM's setting for CPUs without compilation; elsewhere its own default is right."""
    if torch.cuda.is_available() or config.compiles:
        return {}
    return {"ir_op_priority": cpu_kernels.register()}


def _kv_cache_bytes(config: GenerationConfig) -> int | None:
    gib = config.kv_cache_gib or (None if torch.cuda.is_available() else CPU_KV_CACHE_GIB)
    return None if gib is None else int(gib * 2**30)


def _token_logprobs(flat: Any, token_ids: Sequence[int]) -> Tensor:
    """The entries of vLLM's ``FlatLogprobs`` for ``token_ids``, one per position."""
    offset = len(flat.start_indices) - len(token_ids)  # prompt log-probabilities begin with an empty position
    logprobs = []
    for position, token_id in enumerate(token_ids, start=offset):
        entry = flat.token_ids.index(token_id, flat.start_indices[position], flat.end_indices[position])
        logprobs.append(flat.logprobs[entry])
    return torch.tensor(logprobs, dtype=torch.float32)


def _begin_reload(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # type: ignore[import-not-found]

    model = worker.model_runner.get_model()
    if not torch.cuda.is_available():
        for layer in model.modules():  # vLLM on CPUs packs the weights of experts only when it makes their kernel
            method = getattr(layer, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
    with _vllm_config(worker):
        initialize_layerwise_reload(model)


def _load_bucket(worker: Any, bucket: list[tuple[str, Tensor]]) -> None:
    model = worker.model_runner.get_model()
    # Models that are always tied (Gemma 2) compute logits with the embedding and have no separate head.
    known = [pair for pair in bucket if pair[0] != "lm_head.weight" or hasattr(model, "lm_head")]
    with _vllm_config(worker), torch.no_grad():
        model.load_weights(iter(known))


def _load_file(worker: Any, path: str, names: list[str]) -> None:
    tensors = load_file(path)
    _load_bucket(worker, [(name, tensors[name]) for name in names])


def _drop_pages(worker: Any) -> None:
    """Forget weights and cache, as vLLM does on a GPU. Packed weights are out of reach; the next ones replace them."""
    for tensor in (*worker.model_runner.get_model().parameters(), *worker.model_runner.kv_caches):
        storage = tensor.untyped_storage()
        forget(storage.data_ptr(), storage.nbytes())


def _finish_reload(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with _vllm_config(worker):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.vllm_config.model_config)


def _vllm_config(worker: Any) -> Any:
    from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]

    return set_current_vllm_config(worker.vllm_config)


def _require_attention_kernel(llm: Any, model_path: str) -> None:
    """Check that vLLM on CPU has a kernel: it fails only in the first forward, with an error that names no remedy."""
    if torch.cuda.is_available():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # type: ignore[import-not-found]

    head_size = llm.llm_engine.model_config.get_head_size()
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in supported:
        raise UserError(
            f"{model_path} has attention heads of size {head_size} but vLLM on CPU knows {', '.join(map(str, supported))}: "
            "use generation.backend=hf"
        )


def explain(error: Exception, model_path: str, config: GenerationConfig, max_model_len: int) -> Exception:
    """Turn vLLM's ``error`` into one sentence. If the cause is unknown, vLLM's own traceback precedes it."""
    text = str(error)
    if "head_size" in text and "not supported" in text:
        return UserError(f"vLLM has no attention kernel for the head size of {model_path}: use generation.backend=hf")
    if "architectures" in text.lower() and "not supported" in text:
        return UserError(f"vLLM does not know the architecture of {model_path}: use generation.backend=hf")
    if "No available memory for the cache blocks" in text or "To serve at least one request" in text:
        cache = _kv_cache_bytes(config)
        share = f"gpu_memory_utilization={config.gpu_memory_utilization:g}"
        return UserError(
            f"generation.{share if cache is None else f'kv_cache_gib={cache / 2**30:g}'} leaves vLLM no room for one sequence of "
            f"{max_model_len} tokens of {model_path}: raise it or generation.tensor_parallel_size, or lower "
            "data.max_prompt_length or generation.max_length"
        )
    if "less than desired" in text:  # vLLM checks this on a GPU even if kv_cache_gib is set
        return UserError(
            f"generation.gpu_memory_utilization={config.gpu_memory_utilization:g} is more than is free for vLLM "
            f"({text.partition('. ')[0]}): lower it, or end what else runs there"
        )
    log.error("vLLM failed to start", exc_info=error)
    reason = (text.splitlines() or [""])[0]
    return UserError(
        f"vLLM cannot start with {model_path} ({type(error).__name__}: {reason}): see its traceback above, or use "
        "generation.backend=hf"
    )


def _unlink_segment(group_size: int) -> None:
    """Remove a killed run's segment of shared memory: vLLM on CPUs names it only after the ranks, so it would be in the way."""
    rank = torch.distributed.get_rank()
    place = rank % group_size
    ranks = "-".join(str(neighbor) for neighbor in range(rank - place, rank - place + group_size))
    for segment in Path("/dev/shm").glob(f"*tp:0-[[]{ranks}]-cpushm_{place}"):
        segment.unlink()


def _unlink_own_segments(worker: Any) -> None:
    """Remove the names of the workers' segments. All workers have opened them, and killed workers then leave nothing behind."""
    for segment in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*cpushm_*"):
        segment.unlink(missing_ok=True)


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
