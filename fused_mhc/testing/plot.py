"""Pictures of benchmark reports (extra ``report``: matplotlib)."""

from __future__ import annotations

from pathlib import Path

from .bench import BenchRow, Report

__all__ = ["plot_report"]


def _label(row: BenchRow) -> str:
    return f"{row.op} {row.direction}" + (f"\n{row.note}" if row.note.startswith("without") else "")


def plot_report(report: Report, path: Path, title: str) -> None:
    """Bars: share of the copy bandwidth that each operation reaches, a colour for each backend and peer.

    Rows of the report's first shape only; host times, replays of graphs and operations that move no stream are left out.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    first = report.rows[0]
    rows = [
        r
        for r in report.rows
        if (r.T, r.n, r.C) == (first.T, first.n, first.C)
        and r.pct_copy is not None
        and r.bytes
        and r.op != "sinkhorn"
        and not r.note.startswith("graph")
    ]
    labels = list(dict.fromkeys(_label(r) for r in rows))
    backends = list(dict.fromkeys(r.backend for r in rows))
    height = 0.8 / len(backends)
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.55 * len(labels)), layout="constrained")
    for k, backend in enumerate(backends):
        share = {_label(r): r.pct_copy for r in rows if r.backend == backend}
        at = [i + (k - (len(backends) - 1) / 2) * height for i, label in enumerate(labels) if label in share]
        axes.barh(at, [share[label] for label in labels if label in share], height, label=backend)
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"% of the copy bandwidth of the same run ({report.copy_gbps:.0f} GB/s)")
    axes.set_title(f"{title}: T = {first.T}, n = {first.n}, C = {first.C}, {rows[0].dtype} on {report.gpu}")
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
