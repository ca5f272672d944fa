"""The process group of a single rank: it computes what gloo's does, and nobody can connect to it."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_style_rlhf.distributed.alone import init_alone

pytestmark = pytest.mark.slow("starts processes")


def given() -> Tensor:
    return torch.arange(6.0) + 1


def collectives(group: Any) -> dict[str, Any]:
    """What each collective leaves."""
    found: dict[str, Any] = {}

    def in_place(name: str, call: Callable[..., Any], *rest: Any, **named: Any) -> None:
        call(tensor := given(), *rest, group=group, **named)
        found[name] = tensor

    def into(name: str, call: Callable[..., Any], *rest: Any, listed: bool = False, **named: Any) -> None:
        output = torch.zeros(6)
        call([output] if listed else output, *rest, group=group, **named)
        found[name] = output

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG):
        in_place(f"all_reduce {op}", dist.all_reduce, op=op)
    in_place("broadcast", dist.broadcast, 0)
    in_place("reduce", dist.reduce, 0)
    into("all_gather", dist.all_gather, given(), listed=True)
    into("all_gather_into_tensor", dist.all_gather_into_tensor, given())
    into("reduce_scatter", dist.reduce_scatter, [given()])
    into("reduce_scatter_tensor", dist.reduce_scatter_tensor, given())
    into("all_to_all", dist.all_to_all, [given()], listed=True)
    into("all_to_all_single", dist.all_to_all_single, given())
    into("scatter", dist.scatter, [given()], 0)
    output = torch.zeros(6)
    dist.gather(given(), [output], 0, group=group)
    work = dist.all_reduce(later := given(), group=group, async_op=True)
    work.wait()
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, {"of": "rank 0"}, group=group)
    dist.broadcast_object_list(told := [{"of": "rank 0"}], 0, group=group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [{"of": "rank 0"}], 0, group=group)
    dist.barrier(group=group)
    return found | {"gather": output, "async": later, "objects": [gathered, told, scattered]}


def alone(results: Any) -> None:
    init_alone("gloo")
    results.put(_with_ports())


def gloo(results: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results.put(_with_ports())


def _with_ports() -> tuple[list[str], int]:
    groups = [None, dist.new_group([0], backend="gloo"), dist.new_group([0])]
    computed = [str(collectives(group)) for group in groups]
    return computed, sum(each.status == "LISTEN" for each in psutil.Process().net_connections())


def in_a_process(function: Callable[[Any], None]) -> tuple[list[str], int]:
    context = get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=function, args=(results,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    found: tuple[list[str], int] = results.get()
    return found


def test_it_computes_what_gloos_does_and_listens_on_no_port():
    (computed, ports), (expected, ports_of_gloo) = in_a_process(alone), in_a_process(gloo)
    assert computed == expected
    assert ports == 0 < ports_of_gloo
