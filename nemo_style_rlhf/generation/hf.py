"""transformers as a generator: slow and obvious, the oracle for vLLM and the fallback for models that vLLM lacks."""

from collections.abc import Collection, Iterator, Sequence
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_style_rlhf.engine.memory_use import give_back
from nemo_style_rlhf.engine.storages import address
from nemo_style_rlhf.generation.in_process import Finished, InProcessGenerator
from nemo_style_rlhf.generation.interface import GenerationRequest
from nemo_style_rlhf.schema.generation import GenerationConfig


class HFGenerator(InProcessGenerator):
    """Samples with its own copy of the policy, one batch of left-padded prompts at a time.

    A sample's log-probabilities depend on its batch, by rounding. A batch holds requests of only one stream, so that they do not
    depend on when other streams submit requests.
    """

    def __init__(
        self, model: PreTrainedModel, config: GenerationConfig, *, device: torch.device, eos_token_ids: Sequence[int],
        weight_shapes: dict[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Take ownership of ``model``. ``weight_shapes`` names the tensors that every update must bring."""
        super().__init__(weight_shapes)
        self._model = model.to(device).eval().requires_grad_(False)
        self._config = config
        self._device = device
        self._stop = {*config.stop_token_ids, *(() if config.ignore_eos else eos_token_ids)}
        self._queue: dict[str, GenerationRequest] = {}
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def _add(self, name: str, request: GenerationRequest) -> None:
        if request.sampling.stop:
            raise ValueError("generation.backend=hf knows no stop strings: use stop_token_ids, or vllm")
        self._queue[name] = request

    def _step(self) -> list[Finished]:
        stream = self._owners[next(iter(self._queue))]
        batch = [name for name in self._queue if self._owners[name] is stream][: self._config.max_num_seqs]
        return self._generate({name: self._queue.pop(name) for name in batch})

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self._queue[name]

    def _replace_weights(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> None:
        state = self._model.state_dict()
        for bucket in buckets:
            for name, tensor in bucket:
                state[name].copy_(tensor)

    def _sleep(self) -> None:
        storages = {address(each): each.untyped_storage() for each in self._model.parameters()}
        # On a CPU, weights may be part of a file.
        self._emptied = [(each, each.nbytes()) for each in storages.values() if each.resizable()]
        for storage, _ in self._emptied:
            storage.resize_(0)
        give_back(self._device)

    def _wake_weights(self) -> None:
        for storage, size in self._emptied:
            storage.resize_(size)

    @torch.no_grad()
    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        results = []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], device=self._device)
            logprobs = self._model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            results.append(logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).cpu())
        return results

    def close(self) -> None:
        self._queue.clear()

    @torch.no_grad()
    def _generate(self, requests: dict[str, GenerationRequest]) -> list[Finished]:
        batch = list(requests.values())
        generators = [torch.Generator().manual_seed(request.seed) for request in batch]
        tokens: list[list[int]] = [[] for _ in batch]
        logprobs: list[list[float]] = [[] for _ in batch]
        active = set(range(len(batch)))
        longest = max(len(request.prompt) for request in batch)
        ids = torch.tensor([[0] * (longest - len(r.prompt)) + list(r.prompt) for r in batch], device=self._device)
        attention = torch.tensor(
            [[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device=self._device
        )
        temperatures = torch.tensor(
            [[r.sampling.temperature or self._config.temperature] for r in batch], device=self._device
        )
        stop = [self._stop | set(request.sampling.stop_token_ids or ()) for request in batch]
        knows_last = "logits_to_keep" in signature(self._model.forward).parameters
        last_alone = {"logits_to_keep": 1} if knows_last else {}  # else [rows, prompt, vocabulary] at first
        cache = None
        while active:
            output = self._model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=(attention.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                **last_alone,
            )
            cache = output.past_key_values
            distribution = (output.logits[:, -1].float() / temperatures).log_softmax(-1).cpu()
            ids = torch.zeros(len(batch), 1, dtype=torch.long)
            for row in sorted(active):
                token = self._pick(distribution[row], batch[row], generators[row], len(tokens[row]), stop[row])
                ids[row] = token
                tokens[row].append(token)
                logprobs[row].append(float(distribution[row, token]))
                if token in stop[row] or len(tokens[row]) == batch[row].max_tokens:
                    active.remove(row)
            ids = ids.to(self._device)
            attention = torch.cat([attention, attention.new_ones(len(batch), 1)], dim=1)
        return [
            Finished(
                name,
                torch.tensor(tokens[row]),
                torch.tensor(logprobs[row]),
                "stop" if tokens[row][-1] in stop[row] else "length",
            )
            for row, name in enumerate(requests)
        ]

    def _pick(
        self, logprobs: Tensor, request: GenerationRequest, generator: torch.Generator, produced: int, stop: Collection[int]
    ) -> int:  # fmt: skip
        logprobs = logprobs.clone()
        config, own = self._config, request.sampling
        top_k = config.top_k if own.top_k is None else own.top_k
        top_p = config.top_p if own.top_p is None else own.top_p
        if produced < (config.min_length if own.min_length is None else own.min_length):
            logprobs[list(stop)] = -torch.inf
        if top_k > 0:
            logprobs[logprobs < logprobs.topk(min(top_k, len(logprobs))).values[-1]] = -torch.inf
        if top_p < 1:
            ordered, order = logprobs.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            logprobs[order[1:][before[1:] >= top_p]] = -torch.inf  # a top_p that float32 rounds to 0 keeps one token
        return int(logprobs.exp().multinomial(1, generator=generator))
