"""Where the processes of a run go on a Ray cluster, and which GPUs each sees."""

import ssl
import stat
import subprocess

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.ray_placement import Placement, place, remedy
from nemo_style_rlhf.launch.run_certificates import RunSecrets
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.ray import PPORayConfig

GIVEN = [
    "run.output_dir=out", "model.path=policy", "critic.model.path=reward", "data.train_path=rows", "critic.run.output_dir=''",
]  # fmt: skip
TP2 = "generation.tensor_parallel_size=2"


def config(*words: str) -> PPORayConfig:
    return build(PPORayConfig, OmegaConf.from_dotlist([*GIVEN, *words]))


def slots(placement: Placement) -> list[tuple[str, int, int, int]]:
    return [(slot.name, slot.bundle, slot.local_rank, slot.gpus) for slot in placement.slots]


def seen(placement: Placement) -> dict[str, list[str]]:
    """The owners of the GPUs that each process sees."""
    return {slot.name: [each.name for each in placement.sharers(slot)] for slot in placement.slots}


def test_separate_programs_have_bundles_of_their_own():
    placement = place(
        config("ranks=4", "ray.actor_nodes=2", "critic_ranks=2", "generation.engines.count=2", TP2),
        on_gpus=True,
    )  # fmt: skip
    assert placement.bundles == (
        {"CPU": 2, "GPU": 2}, {"CPU": 2, "GPU": 2}, {"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 2}, {"CPU": 1, "GPU": 2},
    )  # fmt: skip
    assert slots(placement) == [
        ("critic-0", 0, 0, 1), ("critic-1", 0, 1, 1),
        ("actor-0", 1, 0, 1), ("actor-1", 1, 1, 1), ("actor-2", 2, 0, 1), ("actor-3", 2, 1, 1),
        ("engine-0", 3, 0, 2), ("engine-1", 4, 0, 2),
    ]  # fmt: skip
    assert placement.strategy == "SPREAD"
    assert seen(placement) == {
        "critic-0": ["critic-0", "critic-1"], "critic-1": ["critic-0", "critic-1"],
        "actor-0": ["actor-0", "actor-1"], "actor-1": ["actor-0", "actor-1"],
        "actor-2": ["actor-2", "actor-3"], "actor-3": ["actor-2", "actor-3"],
        "engine-0": ["engine-0"], "engine-1": ["engine-1"],
    }  # fmt: skip


def test_colocated_programs_see_the_actors_gpus():
    placement = place(
        config(
            "ray.placement=colocated", "ranks=8", "critic_ranks=8", "ray.actor_nodes=2", "ray.critic_nodes=2", "ray.cpus=3",
            "generation.engines.count=4", TP2,
        ),
        on_gpus=True,
    )  # fmt: skip
    assert placement.bundles == ({"CPU": 30, "GPU": 4},) * 2  # 4 + 4 + 2 processes
    assert placement.strategy == "PACK"
    assert sum(slot.gpus for slot in placement.slots) == 8
    visible = seen(placement)
    assert visible["critic-5"] == visible["actor-5"] == ["actor-4", "actor-5", "actor-6", "actor-7"]
    assert [visible[f"engine-{number}"] for number in range(4)] == [
        ["actor-0", "actor-1"], ["actor-2", "actor-3"], ["actor-4", "actor-5"], ["actor-6", "actor-7"],
    ]  # fmt: skip
    assert [placement.of(f"engine-{number}")[0].bundle for number in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_on_cpus_nobody_has_a_gpu(placement):
    placed = place(config(f"ray.placement={placement}", "generation.engines.count=1"), on_gpus=False)
    assert not any("GPU" in bundle for bundle in placed.bundles) and not any(seen(placed).values())
    assert sum(bundle["CPU"] for bundle in placed.bundles) == len(placed.slots) == 3


def test_what_a_run_does_not_start_has_no_seat():
    without = [
        "algorithm.advantage_estimator=grpo",
        "algorithm.samples_per_prompt=2",
        "reward.critic.weight=0",
        "reward.function.weight=1",
        "reward.function.path=f.py",
    ]
    placed = place(config(*without, "generation.engines.count=2", "generation.engines.launch=false"), on_gpus=True)
    assert slots(placed) == [("actor", 0, 0, 1)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["ray.placement=colocated", "ranks=8", "critic_ranks=8", "generation.engines.count=3", TP2],
            "placement=colocated needs as many GPUs for the engines as for the actor, but generation.engines.count=3 x "
            "generation.tensor_parallel_size=2 is 6 and ranks=8: change one of them, or give placement=separate",
        ),
        (
            ["ray.placement=colocated", "ranks=6", "ray.actor_nodes=2", "critic_ranks=6", "ray.critic_nodes=2",
             "generation.engines.count=3", TP2],
            "generation.tensor_parallel_size=2 does not divide the 3 ranks of a node",
        ),
        (["ray.placement=colocated", "ranks=2"], "placement=colocated needs the actor's GPUs for the critic server, but critic"),
        (["ranks=3", "ray.actor_nodes=2"], "ranks=3 is not possible: expected a multiple of ray.actor_nodes=2"),
        (["critic_ranks=3", "ray.critic_nodes=2"], "critic_ranks=3 is not possible: expected a multiple of ray.critic_nodes=2"),
        (["ray.placement=both"], "ray.placement=both is not possible: expected one of separate, colocated"),
        (["ray.wait_s=0"], "ray.wait_s=0.0 is not possible"),
        (["remote_critic_rm.host=a"], "remote_critic_rm.host is set but this command starts a critic server"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words, sentence):
    with pytest.raises(UserError) as error:
        config(*words)
    assert str(error.value).startswith(sentence)


def test_a_runs_secrets_are_its_owners_and_its_servers_are_trusted(tmp_path):
    folder = tmp_path / "secrets"
    secrets = RunSecrets(folder)
    first = secrets.token.read_text()
    assert len(first) == 64 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(secrets.token.stat().st_mode) == 0o600
    for address in ("10.0.0.7", "10.0.0.8"):  # the server moves
        certificate, key = secrets.certificate("critic", address)
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
        verify = ["openssl", "verify", "-CAfile", str(secrets.ca), "-verify_ip", address, str(certificate)]
        assert subprocess.run(verify, capture_output=True).returncode == 0
    assert RunSecrets(folder).token.read_text() != first
    secrets.remove()
    assert not folder.exists()


def test_a_cluster_whose_nodes_count_too_few_cpus_is_told_so():
    needed = place(config("ranks=2", "generation.engines.count=1"), on_gpus=False).bundles
    larger = "start nodes with a larger `ray start --num-cpus`"
    head = {"CPU": 0.0}
    assert f"4 CPUs in all, 2 of them on one node: {larger}" in remedy(needed, [head])
    assert f"4 CPUs in all: {larger}" in remedy(needed, [head, {"CPU": 2.0}])
    assert remedy(needed, [head, {"CPU": 4.0}]).startswith("add nodes, end other jobs")
