"""kubernetes/rayjob.yaml against the definition that KubeRay gives the cluster, and what it starts against our own schema."""

import copy
import lzma
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nemo_style_rlhf.launch.composition import compose
from nemo_style_rlhf.launch.ray_placement import place
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.ray import PPORayConfig
from tests.support.paths import ROOT

JOB = yaml.safe_load((ROOT / "kubernetes" / "rayjob.yaml").read_text())
CRD = ROOT / "tests" / "support" / "rayjob_crd.yaml.xz"


@cache
def definition() -> dict[str, Any]:
    """The schema of ray.io/v1 RayJob, which refuses unknown keys as `kubectl apply` does."""
    crd = yaml.load(lzma.decompress(CRD.read_bytes()), yaml.CSafeLoader)
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1")
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """The schema, without keys that it does not name, and with quantities as numbers or text."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found["type"] = ["integer", "string"]
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = bool(found.get("x-kubernetes-preserve-unknown-fields"))
    return found


def mistakes(job: dict[str, Any]) -> list[str]:
    schema = definition()
    # The API server knows these, of which the definition only says that they are objects.
    schema["properties"]["metadata"] = {"type": "object"}
    return [error.message for error in jsonschema.Draft4Validator(schema).iter_errors(job)]


def test_the_job_is_one_that_kuberay_takes():
    assert mistakes(JOB) == []


def cluster(job: dict[str, Any]) -> Any:
    return job["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: cluster(job).update(authOption={"mode": "token"}),
        lambda job: cluster(job).update(authOptions={"mode": "password"}),
        lambda job: cluster(job)["workerGroupSpecs"][0].update(replicas="two"),
        lambda job: cluster(job)["headGroupSpec"]["template"]["spec"]["containers"][0].pop("name"),
    ],
)
def test_the_definition_notices_mistakes(spoil):
    job = copy.deepcopy(JOB)
    spoil(job)
    assert len(mistakes(job)) == 1


def test_its_cluster_wants_a_token_and_has_the_pinned_ray():
    assert cluster(JOB)["authOptions"] == {"mode": "token"}
    assert f"ray[default]=={cluster(JOB)['rayVersion']}\n" in (ROOT / "requirements" / "actor.txt").read_text()


def test_its_nodes_hold_what_it_starts():
    python, script, *overrides = shlex.split(JOB["spec"]["entrypoint"])
    image = Path("/opt/nemo_style_rlhf")
    assert (Path(python), Path(script)) == (image / ".venv-actor/bin/python", image / "trainers/train_ppo_ray.py")
    assert f"WORKDIR {image}\n" in (ROOT / "kubernetes" / "Dockerfile").read_text()
    config = build(PPORayConfig, compose("ppo_ray", overrides))
    bundles = place(config, on_gpus=True).bundles
    (group,) = cluster(JOB)["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert sum(bundle["GPU"] for bundle in bundles) == gpus * group["replicas"]
    assert max(bundle["GPU"] for bundle in bundles) <= gpus
