"""The DeepSpeed wrapper, one process on CPU."""

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import nn

from nemo_style_rlhf.engine.engine import Engine, NonFiniteError
from nemo_style_rlhf.engine.files import read
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.engine.schedule import lr_factor
from nemo_style_rlhf.engine.shards import make_whole
from nemo_style_rlhf.engine.storages import weights_of
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import EngineConfig, OptimizerConfig, SchedulerConfig
from tests.support.attacks import Attack
from tests.support.digests import digest_of_state

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 24).view(8, 3)
OPTIMIZER = {"offload_optimizer": True}
PARAMETERS = {"offload_parameters": True}


@pytest.fixture(autouse=True, scope="module")
def _process_group():
    init_distributed(CPU)


def make_engine(zero_stage=1, dtype=torch.float32, *, lr=0.05, **overrides):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    optim = OptimizerConfig(lr=lr, weight_decay=0.1)
    scheduler = SchedulerConfig(name="cosine", warmup_steps=2, total_steps=10)
    return Engine(
        module, EngineConfig(zero_stage=zero_stage, optim=optim, scheduler=scheduler, **overrides), device=CPU
    )


def digest_of(engine):
    return digest_of_state(list(engine.snapshot().files.values()))


def take_steps(engine, count, micro_batches=2):
    norms = []
    for _ in range(count):
        for part in X.chunk(micro_batches):
            engine.backward(engine(part.to(next(engine.module.parameters()).dtype)).float().square().sum() / len(X))
        norms.append(engine.step())
    return norms


@pytest.mark.parametrize(
    ("zero_stage", "offload"),
    [(0, {}), (1, {}), (2, {}), (3, {}), (1, OPTIMIZER), (2, OPTIMIZER), (3, OPTIMIZER), (3, PARAMETERS),
     (3, OPTIMIZER | PARAMETERS)],
)  # fmt: skip
def test_equals_plain_torch_adamw(zero_stage, offload):
    engine = make_engine(zero_stage, gradient_clip_val=0.3, **offload)
    assert engine._deepspeed.zero_cpu_offload() == (offload.get("offload_optimizer") is not None)
    assert (engine._deepspeed.zero_offload_param() is not None) == (offload.get("offload_parameters") is not None)
    lrs, norms = [], []
    for _ in range(3):
        lrs.append(engine.lr)
        norms += take_steps(engine, 1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.05 * lr_factor(step, engine.config.scheduler, 10)
        module(X).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        assert norms[step] == pytest.approx(float(norm), rel=1e-5)
        assert lrs[step] == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
    for (_, left), right in zip(engine.named_weights(), module.parameters(), strict=True):
        torch.testing.assert_close(left, right.detach(), rtol=1e-5, atol=1e-6)


def test_masters_take_steps_that_are_too_small_for_bf16_weights():
    """The same weights as with DeepSpeed's masters."""
    plain, zero = (make_engine(stage, torch.bfloat16, lr=1e-3, gradient_clip_val=0.3) for stage in (0, 1))
    start = {name: weight.clone() for name, weight in plain.named_weights()}
    assert take_steps(plain, 8) == pytest.approx(take_steps(zero, 8), rel=1e-5)
    for (name, left), (_, right) in zip(plain.named_weights(), zero.named_weights(), strict=True):
        assert torch.equal(left, right) and not torch.equal(left, start[name])


def test_the_number_of_micro_batches_does_not_change_the_step():
    one, four = make_engine(), make_engine()
    take_steps(one, 2, micro_batches=1)
    take_steps(four, 2, micro_batches=4)
    for left, right in zip(one.module.parameters(), four.module.parameters()):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


FP32_GRADIENTS = {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}}


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "overrides"),
    [
        (0, torch.float32, {}),
        (0, torch.bfloat16, {}),
        (1, torch.float32, {}),
        (1, torch.bfloat16, {}),
        (2, torch.bfloat16, {}),
        (2, torch.bfloat16, FP32_GRADIENTS),
        (3, torch.bfloat16, FP32_GRADIENTS),
    ],
)
def test_load_brings_back_every_bit_also_on_a_used_engine(tmp_path, zero_stage, dtype, overrides):
    engine = make_engine(zero_stage, dtype, **overrides)
    take_steps(engine, 2)
    saved = digest_of(engine)
    engine.snapshot().write(tmp_path)
    first = take_steps(engine, 2)
    ahead = digest_of(engine)
    assert ahead != saved
    engine.load(tmp_path)
    assert digest_of(engine) == saved
    assert take_steps(engine, 2) == first
    assert digest_of(engine) == ahead


@pytest.mark.parametrize("then", [0, 1, 3])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_pickle_in_a_checkpoint_is_not_run_and_nothing_changes(tmp_path, zero_stage, then):
    """In any of its files, one after another; in the shape it was written in and in another."""
    engine = make_engine(zero_stage)
    engine.snapshot().write(tmp_path)
    engine = make_engine(then)
    take_steps(engine, 1)
    before = digest_of(engine)
    files = sorted(tmp_path.rglob("*.pt"))
    assert len(files) == (1 if zero_stage == 0 else 2)
    for path in files:
        content = path.read_bytes()
        whole = torch.load(path, weights_only=False)
        for attack in (Attack(tmp_path / "marker"), {**whole, "surplus": Attack(tmp_path / "marker")}):
            torch.save(attack, path)
            sentence = rf"{path.name} is damaged, or holds something else than tensors .* bring it back from a copy"
            with pytest.raises(UserError, match=sentence):
                engine.load(tmp_path)
        path.write_bytes(content)
    assert not (tmp_path / "marker").exists() and digest_of(engine) == before
    engine.load(tmp_path)
    assert digest_of(engine) != before


class Attribute:
    """Pickled as Python 3.11.2 pickles the member of an enumeration."""

    def __init__(self, owner: type, name: str) -> None:
        self._of = owner, name

    def __reduce__(self) -> tuple:
        return getattr, self._of


def test_a_zero_stage_as_some_pythons_pickle_it_is_read_and_no_other_attribute(tmp_path):
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "weights")}, tmp_path / "old.pt")
    assert read(tmp_path / "old.pt") == {"zero_stage": ZeroStageEnum.weights}
    for owner, name in ((LossScaler, "backward"), (ZeroStageEnum, "mro")):
        torch.save({"zero_stage": Attribute(owner, name)}, tmp_path / "attack.pt")
        with pytest.raises(UserError, match=r"attack\.pt is damaged, or holds something else"):
            read(tmp_path / "attack.pt")


def test_deepspeeds_own_reader_is_replaced(tmp_path):
    """By one that refuses what comes to a file after it was looked at."""
    torch.save({"module": Attack(tmp_path / "marker")}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt is damaged, or holds something else"):
        make_engine()._deepspeed.checkpoint_engine.load(str(tmp_path / "a.pt"), map_location="cpu")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(("zero_stage", "then"), [(0, 0), (0, 1), (1, 1), (1, 2), (3, 3)])
def test_a_run_goes_on_with_the_optimizer_its_config_describes_now(tmp_path, zero_stage, then):
    engine = make_engine(zero_stage)
    take_steps(engine, 3)
    engine.snapshot().write(tmp_path)
    changed = make_engine(then)
    changed.config.optim = OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3)
    changed.load(tmp_path)
    group = changed._optimizer.param_groups[0]
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-5, 0.3)
    for position in (3, 4):
        assert changed.lr == 0.01 * lr_factor(position, changed.config.scheduler, 10)
        take_steps(changed, 1)


def test_weights_are_whole_while_shares_are_gathered_ahead():
    """After a forward without a backward DeepSpeed's prefetch for that is still under way."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    ahead = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 1,
        "stage3_prefetch_bucket_size": 300,
    }
    config = EngineConfig(zero_stage=3, deepspeed={"zero_optimization": ahead})
    engine = Engine(module, config, device=CPU, total_steps=10)
    x = torch.randn(4, 16)
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
    with torch.no_grad():
        expected = engine(x)
    assert any(parameter.ds_status.name == "INFLIGHT" for parameter in module.parameters())
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    plain.load_state_dict(dict(engine.named_weights()))
    torch.testing.assert_close(plain(x), expected)
    with torch.no_grad():
        engine(x)
    make_whole(engine._deepspeed, keep=True)
    torch.testing.assert_close(module(x), expected)


def test_a_nan_loss_stops_before_it_touches_the_weights():
    engine = make_engine()
    before = digest_of(engine)
    with pytest.raises(NonFiniteError, match="loss is nan"):
        engine.backward(engine(X).sum() * float("nan"))
    assert digest_of(engine) == before


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(UserError, match=r"engine\.scheduler\.total_steps"):
        Engine(nn.Linear(1, 1), EngineConfig(scheduler=SchedulerConfig(name="linear")), device=CPU)


def test_ranks_that_nodes_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"zero_hpz_partition_size=2 with 1 ranks, which it must divide"):
        make_engine(3, zero_hpz_partition_size=2)


def test_schedule_by_hand():
    linear = SchedulerConfig(name="linear", warmup_steps=1, min_lr_ratio=0.1)
    # warmup 1/2; then from 1 to .1 over steps 1..5
    assert [lr_factor(step, linear, 5) for step in (0, 1, 3, 5, 9)] == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])
    cosine = SchedulerConfig(name="cosine")
    assert [lr_factor(step, cosine, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def held(engine):
    """Bytes that the engine's weights, masters, states and gradients hold where they are computed with."""
    tensors = [each for each in (*weights_of(engine.module), *engine._state_tensors()) if not each.is_meta]
    # What a CPU has loaded may still be part of the file.
    return sum(each.untyped_storage().nbytes() for each in tensors if each.untyped_storage().resizable())


@pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [(0, torch.float32), (0, torch.bfloat16), (1, torch.float32), (2, torch.float32), (3, torch.float32)],
)
def test_offloading_takes_every_byte_off_the_device_and_brings_every_bit_back(tmp_path, zero_stage, dtype):
    """On a CPU as on a GPU: the content moves to other memory, and the storages that held it are empty. Meanwhile it is saved,
    exported and loaded."""
    engine, stays = make_engine(zero_stage, dtype), make_engine(zero_stage, dtype)
    for each in (engine, stays):
        take_steps(each, 2)
    engine.eval()
    whole = held(engine)
    engine.offload()
    assert held(engine) == 0 < whole
    assert digest_of(engine) == digest_of(stays)
    for (_, weight), (_, same) in zip(engine.named_weights(), stays.named_weights(), strict=True):
        assert torch.equal(weight, same)
    engine.snapshot().write(tmp_path)
    assert held(engine) == 0
    engine.offload(keep_weights=True)
    with torch.no_grad():
        assert torch.equal(engine(X.to(dtype)), stays(X.to(dtype)))
    assert 0 < held(engine) < whole
    engine.offload()
    engine.train()
    assert take_steps(engine, 2) == take_steps(stays, 2)
    assert digest_of(engine) == digest_of(stays)
    engine.offload()
    engine.load(tmp_path)
    assert held(engine) == 0
    engine.reload()
    stays.load(tmp_path)
    assert take_steps(engine, 1) == take_steps(stays, 1)
    assert digest_of(engine) == digest_of(stays)
