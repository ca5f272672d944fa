"""A generation engine as a target of malformed requests: what they are made of, and the state that they must not change."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from nemo_style_rlhf.engines.client import EngineClient
from nemo_style_rlhf.engines.messages import EngineStatus
from nemo_style_rlhf.generation.interface import ProbeTarget
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, Program
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
from tests.fuzz.fuzzer import MUTATIONS, TOKEN, Random, Raw, post, tensor, text
from tests.fuzz.http_faults import FAULTS, REFUSED, Wire, metrics
from tests.fuzz.kserve_faults import DEEPEST, KSERVE_MUTATIONS, as_json, pick, send_json
from tests.support.critic_server import KEPT_BYTES, VOCABULARY, kept_by
from tests.support.models import save_policy
from tests.support.processes import Process
from tests.support.sampling_settings import IMPOSSIBLE

LEASE, NOBODYS_LEASE = "the trainer's", "nobody's"
VERSION, LONGEST = 3, 40
QUIET_S = 30.0
PROBE = (3, 4, 5, 6)


def json_call(model: str, content: object) -> Raw:
    return Raw(model, {"request": text(json.dumps(content))})


def valid_generate(lease: str = LEASE, **changes: Any) -> Raw:
    """Two requests, with ``changes`` of tensors or of fields of the JSON."""
    arrays = {"tokens": [5, 6, 7, 8], "sequence_lengths": [1, 3], "seeds": [1, 2], "limits": [8, 6]}
    tensors = {
        name: tensor(np.array(changes.pop(name, values)), "INT64" if name == "seeds" else "INT32")
        for name, values in arrays.items()
    }
    content = {"lease": lease, "version": VERSION, "sampling": {"1": {"temperature": 0.7, "stop_token_ids": [9]}}}
    return Raw("engine_generate", tensors | {"request": text(json.dumps(content | changes))})


def valid_status() -> Raw:
    return Raw("engine_status", {})


def valid_load(lease: str, folder: str = "/nowhere", digest: str = "") -> Raw:
    return json_call("engine_load", {"lease": lease, "folder": folder, "digest": digest})


def valid_send(lease: str, file: str = "part_00000.safetensors", offset: int = 0) -> Raw:
    request = json.dumps({"lease": lease, "file": file, "offset": offset})
    return Raw("engine_send", {"content": text(b"weights"), "request": text(request)})


def valid_shutdown(lease: str) -> Raw:
    return json_call("engine_shutdown", {"lease": lease})


# --- each makes a request that must be refused ------------------------------------------------------------------------


def impossible_call(draw: Random) -> Raw:
    changes: list[dict[str, Any]] = [
        {"limits": [0, 8]}, {"limits": [-1, 8]}, {"limits": [2**31 - 1, 8]}, {"limits": [40, 8]}, {"limits": [8]},
        {"limits": [8] * 3}, {"limits": []}, {"seeds": [-1, 2]}, {"seeds": [1, -(2**63)]}, {"seeds": [1]}, {"seeds": [1, 2, 3]},
        {"sequence_lengths": [0, 4]}, {"sequence_lengths": [-1, 5]}, {"sequence_lengths": [2**31 - 1] * 2},
        {"sequence_lengths": [4]}, {"sequence_lengths": [2, 3]}, {"sequence_lengths": [1, 1, 2]},
        {"tokens": [5, 6, 7, VOCABULARY]}, {"tokens": [5, 6, -1, 8]}, {"tokens": [2**31 - 1, 6, 7, 8]}, {"tokens": [5, 6, 7]},
        {"tokens": []}, {"tokens": [5] * 80, "sequence_lengths": [40, 40]},
        {"tokens": [], "sequence_lengths": [], "seeds": [], "limits": []},
        {"version": 0}, {"version": VERSION + 1}, {"version": -1}, {"version": 10**4000}, {"version": str(VERSION)},
        {"version": float(VERSION)}, {"lease": ""}, {"lease": "\ud800"}, {"lease": "x" * 60_000}, {"lease": LEASE.upper()},
        {"sampling": {"2": {}}}, {"sampling": {"01": {}}}, {"sampling": {"-1": {}}}, {"sampling": {"": {}}},
        {"sampling": {"1": []}}, {"sampling": {"1": None}}, {"sampling": {"1": 5}}, {"sampling": {"1": {"beams": 2}}},
        {"sampling": {"1": {"": 1}}}, {"sampling": {"\ud800": {}}}, {"sampling": {"x" * 50_000: {}}},
    ]  # fmt: skip
    return valid_generate(**pick(draw, changes))


def impossible_sampling(draw: Random) -> Raw:
    """One setting that cannot be, beside others that can."""
    name = pick(draw, list(IMPOSSIBLE))
    of_vllm = {"temperature": [2.1], "stop": [["w5"]], "stop_token_ids": [[VOCABULARY], [2**70], [9, 10**4000]]}
    setting = {name: pick(draw, IMPOSSIBLE[name] + of_vllm.get(name, []))}
    return valid_generate(sampling={pick(draw, ["0", "1"]): possible_settings(draw) | setting})


def deep_sampling(draw: Random) -> Raw:
    raw, depth = valid_generate(), int(10 ** draw.uniform(0.4, math.log10(DEEPEST / 10)))
    places = ['{"1": {"stop": [%s]}}', '{"1": {"top_k": %s}}', '{"1": %s}', "%s"]
    nested = pick(draw, places) % ("[" * depth + "]" * depth)
    raw.tensors["request"] = text(f'{{"lease": "{LEASE}", "version": {VERSION}, "sampling": {nested}}}')
    return raw


def impossible_acquire(draw: Random) -> Raw:
    sizes: list[Any] = [
        [math.inf], [math.nan], [1.5], ["1"], [-1], [True], [None], [[1]], "12", {}, {"1": 2}, None, 7, -(10**400),
    ]  # fmt: skip
    shapes = pick(draw, [{"a": [2], "b": pick(draw, sizes)}, pick(draw, [None, [], "", 5, [["a", [1]]], True])])
    lease = pick(draw, [LEASE, NOBODYS_LEASE, "", "\ud800", "x" * 60_000])
    content = pick(draw, [{"lease": lease, "shapes": shapes}, {"lease": lease}, {"lease": None, "shapes": {"a": [1]}}])
    return json_call("engine_acquire", content)


def impossible_load(draw: Random) -> Raw:
    """A folder that is no text, one without these weights, or any folder without the lease."""
    folders = ["/nowhere", "/", "", "a\0b", "\ud800", "x" * 60_000, "../" * 500, "/proc/self/fd/0", "/dev/zero", "~"]
    wrong = [None, 5, True, [], {}, ["/nowhere"], 10**400]
    if draw.random() < 0.5:
        return json_call("engine_load", {"lease": LEASE, "folder": pick(draw, wrong), "digest": ""})
    return valid_load(pick(draw, [LEASE, NOBODYS_LEASE, "", "\0"]), pick(draw, folders), pick(draw, folders))


def impossible_send(draw: Random) -> Raw:
    """A piece for nobody, or that leaves a gap."""
    files = ["part_00000.safetensors", "manifest.json", "../../etc/passwd", "", "a\0b", "\ud800", "x" * 60_000]
    if draw.random() < 0.5:
        return valid_send(pick(draw, [NOBODYS_LEASE, "", "\0"]), pick(draw, files), pick(draw, [0, 1, -1]))
    return valid_send(LEASE, pick(draw, files), pick(draw, [-1, 1, 2**31, 2**70, 10**4000, -(10**4000)]))


def impossible_receive(draw: Random) -> Raw:
    """A group that cannot be; one that may be would be waited for."""
    content: dict[str, Any] = {
        "lease": LEASE, "group": "group-0123456789abcdef", "rank": 1, "size": 2, "backend": "gloo",
        "files": [["manifest.json", 10]],
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {"lease": NOBODYS_LEASE}, {"group": pick(draw, ["../../tmp/x", "", "group-", "a\0b", "\ud800", None, "x" * 60_000])},
        {"rank": pick(draw, [0, -1, 2, 10**4000, True, None])}, {"size": pick(draw, [0, 1, -1, 2**31, 10**400, "2"])},
        {"backend": pick(draw, ["mpi", "", None])},
        {"files": pick(draw, [{}, [[]], [["a"]], [[1, "a"]], [["a", -1]], [["a", 2**62]], [["a", 10**4000]], None, "a", [{}]])},
    ]  # fmt: skip
    return json_call("engine_receive", content | pick(draw, changes))


def mutated(draw: Random) -> Raw:
    """A right request, made wrong in a way that no server of ours takes."""
    raw = pick(draw, [valid_generate, valid_generate, partial(valid_load, NOBODYS_LEASE), partial(valid_send, NOBODYS_LEASE),
                      partial(valid_shutdown, LEASE), valid_status])()  # fmt: skip
    pick(draw, MUTATIONS + KSERVE_MUTATIONS if raw.tensors else KSERVE_MUTATIONS)(raw, draw)
    return raw


WRONG: list[Callable[[Random], Raw]] = [
    mutated, mutated, mutated, impossible_call, impossible_call, impossible_sampling, impossible_sampling, deep_sampling,
    impossible_acquire, impossible_load, impossible_send, impossible_receive,
]  # fmt: skip


# --- odd requests that may be right -----------------------------------------------------------------------------------


def possible_settings(draw: Random) -> dict[str, Any]:
    """Up to four settings, each possible, and odd together or in size."""
    values: dict[str, list[Any]] = {
        "temperature": [1e-5, 0.009, 2, 1.0, None], "top_p": [1e-320, 1e-9, 0.5, 1, None],
        "top_k": [-1, 0, 1, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**63, 2**70, 10**4000],
        "max_length": [1, 2**70], "min_length": [0, 1, 8, 2**70], "stop": [[], None],
        "stop_token_ids": [[], [0], [VOCABULARY - 1], [5] * 1000, list(range(VOCABULARY)), None],
    }  # fmt: skip
    names = draw.permutation(sorted(values))[: draw.integers(5)]
    return {str(name): pick(draw, values[str(name)]) for name in names}


def odd_generate(draw: Random) -> Raw:
    """Odd sampling settings, up to 50 requests, long prompts, seeds and limits at their bounds."""
    count = int(pick(draw, [1, 2, 5, 5, 50]))
    lengths = draw.integers(1, 4, count) if count > 5 else draw.integers(1, LONGEST, count)
    sampling = {str(index): possible_settings(draw) for index in range(count) if draw.random() < 0.5}
    limits = [int(pick(draw, [1, 2, 4, LONGEST - length])) if count < 6 else 2 for length in lengths.tolist()]
    return valid_generate(
        tokens=draw.integers(0, VOCABULARY, lengths.sum()), sequence_lengths=lengths, limits=limits, sampling=sampling,
        seeds=[int(pick(draw, [0, 2**31, 2**32, 2**63 - 1, draw.integers(2**62)])) for _ in range(count)],
    )  # fmt: skip


class EngineCalls:
    """Requests to an engine, right and wrong. ``weights`` names the folder and the digest of those that it holds."""

    def __init__(self, *weights: str) -> None:
        self.faults = [fault for fault in FAULTS if fault is not metrics]  # an engine has none
        self._weights = weights

    def wrong(self, draw: Random) -> tuple[Wire, str]:
        """A request that must be refused, or one that is as odd but may be right, and the name of its fault."""
        if draw.random() < 0.3:
            makers = [odd_generate] * 20 + [self._again]
            maker, right = pick(draw, makers), {200, 400, 401, 413}
        else:
            maker, right = pick(draw, WRONG), REFUSED | {401}
        raw = maker(draw)
        return Wire.of(raw, right, valid_status), f"{maker.__name__} of {raw.model}"

    def harmless(self, draw: Random) -> Wire:
        """A correct request that changes nothing, or would change something but has no lease: any answer is accepted."""
        makers = [valid_generate, valid_generate, valid_status, partial(valid_generate, NOBODYS_LEASE),
                  partial(valid_load, NOBODYS_LEASE), partial(valid_send, NOBODYS_LEASE),
                  partial(valid_shutdown, NOBODYS_LEASE)]  # fmt: skip
        chosen = int(draw.integers(len(makers)))
        raw = makers[chosen]()
        if draw.random() < 0.25:
            send_json(raw, json.dumps(as_json(raw)).encode())
        return Wire.of(raw, {200} if chosen < 3 else {400}, valid_status)

    def _again(self, draw: Random) -> Raw:
        """Ask for what the engine has done already: the weights that it holds, the lease of its trainer."""
        return pick(
            draw, [valid_load(LEASE, *self._weights), json_call("engine_acquire", {"lease": LEASE, "shapes": {}})]
        )


# --- the engine -------------------------------------------------------------------------------------------------------


class EngineTarget:
    """An engine that holds a version of the weights for a lease that the attacks know."""

    kept_limit = 4 * KEPT_BYTES
    """More than a server's: vLLM's working memory, which stays at its peak, reaches it under the attacks."""

    def __init__(self, folder: Path, settings: list[str], token_file: Path, ca: str | None) -> None:
        model, ready, self.log = save_policy(folder / "model"), folder / "ready.json", folder / "engine.log"
        command = [
            "servers/serve_engine.py", f"model.path={model}", "model.dtype=float32", "run.device=cpu", "run.num_threads=1",
            "generation.kv_cache_gib=0.02", "generation.max_num_seqs=8", f"sequences.max_length={LONGEST}", "server.port=0",
            f"server.ready_file={ready}", f"server.token.token_file={token_file}", *settings,
        ]  # fmt: skip
        self._process = Process(Program("engine", [str(ACTOR_PYTHON), *command], ready_file=ready), self.log)
        self._store = WeightStore(folder / "weights")
        try:
            tensors, probe = trained(save_policy(folder / "trained", seed=1))
            published = self._store.publish(OwnWeights(VERSION, tensors, probe))
            self.port = int(self._process.ready()["port"])
            self._client = EngineClient(
                "127.0.0.1", self.port, token=TOKEN, retries=2, timeout_s=60, tls=ClientTlsConfig(ca=ca)
            )
            self._client.acquire(LEASE, {name: tuple(each.shape) for name, each in tensors})
            self._client.load(LEASE, published)
        except BaseException:
            self.close()
            raise
        self._post = partial(post, self, ca=ca)
        self.calls = EngineCalls(str(published.folder), published.digest)

    def processes(self) -> list[psutil.Process]:
        """The processes of the engine and its front door."""
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def kept_bytes(self) -> int:
        return kept_by(self.processes())

    def status(self) -> EngineStatus:
        """Status of the engine once it has answered the calls of clients that are gone, but for its steps."""
        deadline = time.monotonic() + QUIET_S
        while (status := self._client.status()).running and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (status.running, status.lease, status.version) == (0, LEASE, VERSION)
        return replace(status, steps=0, cache_share=0.0)

    def answers(self) -> list[bytes]:
        """Samples of good requests, which always have the same bits."""
        prompts = [valid_generate(), valid_generate(seeds=[2**40, 0], limits=[30, 30], sampling={})]
        return [self._post(prompt).content for prompt in prompts]

    def check_at_end(self) -> None:
        """Check that the trainer can end the engine."""
        assert self._post(valid_shutdown(LEASE)).status_code == 200
        assert self._process.wait(30) == 0

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # it has not started
            self._client.close()
        self._process.stop()
        self._store.close()


@torch.no_grad()
def trained(path: Path) -> tuple[list[tuple[str, torch.Tensor]], ProbeTarget]:
    """The weights of a model, with log-probabilities that prove them."""
    model = load_causal_lm(ModelConfig(path=str(path), dtype="float32"))
    logprobs = model(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    probe = ProbeTarget((PROBE,), (logprobs.gather(-1, torch.tensor(PROBE[1:])[:, None]).squeeze(-1),), 1e-3)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()], probe
