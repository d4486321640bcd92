"""The demo's report: three pictures, a JSON file with every figure, and one page that shows them."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .mixing import Gains, gains
from .model import PLAIN
from .training import Result

__all__ = ["TABLE_HEAD", "table_row", "write_report"]

#: How each model's line looks; the three differ in more than colour, so that lines on top of one another show.
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "#9ca3af", "linestyle": "-", "linewidth": 4, "marker": "o", "markersize": 8},
    "two-pass mHC": {"color": "#2563eb", "linestyle": "-", "linewidth": 1.5, "marker": "o", "markersize": 4},
    "single-pass mHC": {
        "color": "#d97706",
        "linestyle": "--",
        "linewidth": 1.5,
        "marker": "x",
        "markersize": 6,
    },
}
TABLE_HEAD = ("model", "held-out", "at 2/3", "last third", "step", "parameters", "peak")

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fused-mhc demo</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
  h1 {{ margin-bottom: 0; }}
  h2 {{ margin: 2.5rem 0 .5rem; }}
  img {{ max-width: 100%; height: auto; }}
  .scroll {{ overflow-x: auto; }}
  table {{ border-collapse: collapse; }}
  th, td {{ padding: .35rem .9rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap; }}
  th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
  .facts {{ color: #4b5563; }}
</style>
<h1>Three ways to carry a residual stream</h1>
<p class="facts">{facts}</p>
<div class="scroll"><table>
<tr>{head}</tr>
{rows}
</table></div>
<p>Held-out: loss in nats a byte on files that no model was trained on, at the end and after two thirds of the steps.
Step: median time of a training step. Peak: memory of parameters, optimizer state, and the most that one training step holds beside them.</p>
<h2>Loss</h2>
<p>Thin lines: the loss of each training batch, smoothed. Lines with marks: held-out files.</p>
<img src="loss.png" alt="Training and held-out loss of each model over the training steps">
<h2>Residual mixing of one site</h2>
<p>H_res[old, new], the mean over the tokens of a held-out batch, with its row and column sums.
Columns are normalised last, so their sums are 1 to rounding; rows are as near to 1 as the iterations bring them.</p>
<img src="mixing.png" alt="Heat maps of the residual mixing matrices with row and column sums">
<h2>Gain of the composed residual mixing over depth</h2>
<p>The largest absolute row sum (forward) and column sum (backward) of the product of all mixing matrices up to a
site, averaged over tokens. A single residual stream has a gain of 1; matrices that are doubly stochastic keep it.</p>
<img src="gain.png" alt="Forward and backward gain of the composed mixing matrices after each site">
</html>
"""


def table_row(result: Result) -> tuple[str, ...]:
    """One model's figures, as `TABLE_HEAD` names them."""
    early, end = result.last_third()
    trend = "falling" if end < early else "not falling"
    return (
        result.name,
        f"{end:.3f}",
        f"{early:.3f}",
        trend,
        f"{result.step_seconds * 1e3:.0f} ms",
        f"{result.parameters:,}",
        f"{result.peak_bytes / 2**20:.0f} MiB",
    )


def _smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    total, norm, out = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def _loss_picture(path: Path, results: Sequence[Result]) -> None:
    figure, axes = _figure(1, (9, 4.5))
    for result in results:
        style = STYLES[result.name]
        steps = range(1, len(result.train_loss) + 1)
        axes[0].plot(steps, _smoothed(result.train_loss), color=style["color"], linewidth=0.9, alpha=0.6)
        axes[0].plot(*zip(*result.held_out, strict=True), label=result.name, **style)
    axes[0].set(xlabel="step", ylabel="nats a byte")
    axes[0].legend(frameon=False)
    _save(figure, path)


def _mixing_picture(path: Path, matrices: dict[str, Tensor], site: int) -> None:
    figure, axes = _figure(len(matrices), (4.6 * len(matrices), 4.6))
    for ax, (name, all_sites) in zip(axes, matrices.items(), strict=True):
        mean = all_sites[site].double().mean(0)
        n = len(mean)
        ax.imshow(mean.numpy(), cmap="Blues", vmin=0, vmax=1)
        for i in range(n):
            for j in range(n):
                value = float(mean[i, j])
                ax.text(
                    j, i, f"{value:.3f}", ha="center", va="center", color="white" if value > 0.55 else "black"
                )
            ax.text(n - 0.4, i, f"{float(mean[i].sum()):.6f}", ha="left", va="center", fontsize=8)
            ax.text(i, n - 0.3, f"{float(mean[:, i].sum()):.6f}", ha="center", va="top", fontsize=8)
        ax.set(title=f"{name}, site {site + 1}", xlabel="new stream", ylabel="old stream")
        names = [str(i + 1) for i in range(n)]
        ax.set_xticks(range(n), names)
        ax.set_yticks(range(n), names)
        ax.xaxis.tick_top()
        ax.xaxis.set_label_position("top")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    _save(figure, path)


def _gain_picture(path: Path, gain: dict[str, Gains]) -> None:
    figure, axes = _figure(2, (9, 4))
    for ax, direction in zip(axes, ("forward", "backward"), strict=True):
        for name, values in gain.items():
            line = getattr(values, direction)
            ax.plot(range(1, len(line) + 1), line, label=name, **STYLES[name])
        low, high = ax.get_ylim()
        ax.set(title=f"{direction} gain", xlabel="sites composed", ylim=(min(low, 0.99), max(high, 1.01)))
        ax.ticklabel_format(axis="y", useOffset=False)
    axes[0].legend(frameon=False)
    _save(figure, path)


def _figure(columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)


def write_report(
    folder: Path, facts: dict[str, str], results: Sequence[Result], matrices: dict[str, Tensor]
) -> Path:
    """Write pictures, ``results.json`` and ``index.html``; return the page's path.

    Args:
        folder: exists.
        facts: what to say about the run.
        results: one per model.
        matrices: residual mixing of each model on one held-out batch, ``[sites, tokens, n, n]`` (CPU).
    """
    gain = {name: gains(of) for name, of in matrices.items()}
    mixed = {name: of for name, of in matrices.items() if name != PLAIN}
    _loss_picture(folder / "loss.png", results)
    _mixing_picture(folder / "mixing.png", mixed, site=len(matrices[PLAIN]) // 2)
    _gain_picture(folder / "gain.png", gain)
    document = {
        "facts": facts,
        "models": [
            {**vars(r), "gain_forward": gain[r.name].forward, "gain_backward": gain[r.name].backward}
            for r in results
        ],
    }
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)

    page = folder / "index.html"
    page.write_text(
        _PAGE.format(
            facts=html.escape(" · ".join(f"{name} {value}" for name, value in facts.items())),
            head=cells("th", TABLE_HEAD),
            rows="\n".join(f"<tr>{cells('td', table_row(result))}</tr>" for result in results),
        ),
        encoding="utf-8",
    )
    return page
