"""A picture of a launch: workers from top to bottom, time from left to right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fused_mhc.errors import BackendError
from fused_mhc.profiler.records import COMPUTE, Launch

__all__ = ["draw_gantt"]


def draw_gantt(launch: Launch, path: str | Path) -> None:
    """Write the launch as a picture (the suffix of ``path`` chooses the format); colours are stages.

    Raises:
        BackendError: matplotlib (extra ``report``) is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise BackendError(
            "draw_gantt: expected matplotlib (pip install 'fused-mhc[report]'), got none"
        ) from error
    work = launch.records[launch.records["kind"] == COMPUTE]
    base = int(work["start"].min()) if len(work) else 0
    workers = len(launch.worker_roles)
    figure = Figure(figsize=(12, min(2.0 + 0.06 * workers, 12)), layout="constrained")
    axes = figure.add_subplot()
    names = [stage.name for stage in launch.stages]
    for index, name in enumerate(names):
        mine = work[work["stage"] == index]
        left, width = (mine["start"] - base) / 1e3, (mine["end"] - mine["start"]) / 1e3
        axes.barh(mine["worker"], width, left=left, height=0.9, color=f"C{index}", linewidth=0)
    axes.set_ylim(workers - 0.5, -0.5)
    axes.set_xlabel("microseconds")
    axes.set_ylabel("worker")
    axes.margins(x=0)
    idle = ", ".join(f"{role} {share:.0%}" for role, share in launch.idle_share().items())
    axes.set_title(
        f"{launch.kernel_name} {launch.direction} ({launch.executor}): {launch.span_ns / 1e3:.0f} us, idle {idle}"
    )
    handles = [Patch(color=f"C{index}", label=name) for index, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    roles = np.flatnonzero(
        [a != b for a, b in zip(launch.worker_roles, launch.worker_roles[1:], strict=False)]
    )
    for border in roles.tolist():
        axes.axhline(border + 0.5, color="black", linewidth=0.5)
    figure.savefig(Path(path), dpi=150)
