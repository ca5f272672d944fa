"""Shows a plan as a table on the terminal."""

from collections.abc import Sequence

from rich.table import Table

from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.planning.phases import COMPONENTS, ENGINE, GIB, ProcessPlan


def table(processes: Sequence[ProcessPlan], device: Device, *, together: bool) -> Table:
    """A table with a row for each component at a peak and a column for each process; in GiB of one rank."""
    result = Table(show_footer=True)
    totals = [plan.peak.total for plan in processes]
    result.add_column("", footer="total")
    for plan, total in zip(processes, totals, strict=True):
        unit = "of them" if plan.name == ENGINE else "ranks"
        ranks = f", {plan.ranks} {unit}" if plan.ranks > 1 else ""
        result.add_column(f"{plan.name}{ranks}\n({plan.peak.name})", justify="right", footer=_gib(total))
    for component in COMPONENTS:
        sizes = [plan.peak.parts[component] for plan in processes]
        if any(sizes):
            result.add_row(component, *(_gib(size) for size in sizes))
    if not device.cuda and any(plan.ranks > 1 for plan in processes):
        _section(result, "all ranks", [_gib(plan.peak.total * plan.ranks) for plan in processes])
    per_device = [total * (1 if device.cuda else plan.ranks) for plan, total in zip(processes, totals, strict=True)]
    share = [sum(per_device)] * len(processes) if together else per_device
    _section(
        result,
        "share of the device" if not together else "share, together",
        [f"{each / device.memory:.0%}" for each in share],
    )
    return result


def _section(result: Table, label: str, cells: list[str]) -> None:
    result.add_section()
    result.add_row(label, *cells)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"
