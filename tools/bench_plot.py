"""A plot of `hal bench`, as the evidence pages have it.

    hal bench cpu --json > cpu.json
    python tools/bench_plot.py docs/evidence/hooks.svg cpu.json [OTHER.json ...]      # pip install matplotlib

One panel a hook; for each size and device the median of a call, and as a thin line the middle half of all calls.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

HEIGHT = 0.34
"""Inches of a bar and of its row."""


def draw(results: list[dict[str, Any]]) -> Figure:
    """Return the figure of some results of ``hal bench --json``, with all hooks of the first."""
    hooks = list(dict.fromkeys(row["hook"] for row in results[0]["rows"]))
    sizes = {hook: [row["size"] for row in results[0]["rows"] if row["hook"] == hook] for hook in hooks}
    rows = sum(map(len, sizes.values()))
    figure = Figure(figsize=(8, HEIGHT * len(results) * rows + 0.6 * len(hooks) + 0.6), layout="constrained")
    panels = figure.subplots(len(hooks), 1, squeeze=False, height_ratios=[len(sizes[hook]) for hook in hooks])[:, 0]
    for panel, hook in zip(panels, hooks, strict=True):
        for number, result in enumerate(results):
            found = {row["size"]: row["call_us"] for row in result["rows"] if row["hook"] == hook}
            times = [found.get(size, {"p25": 0, "p50": 0, "p75": 0}) for size in sizes[hook]]
            middle = [time["p50"] for time in times]
            around = [
                [time["p50"] - time["p25"] for time in times],
                [time["p75"] - time["p50"] for time in times],
            ]
            places = [at + 0.8 * (number + 0.5) / len(results) - 0.4 for at in range(len(times))]
            bars = panel.barh(places, middle, 0.8 / len(results), xerr=around, label=result["device"])
            panel.bar_label(bars, [_label(value) for value in middle], padding=4, fontsize=8)
        panel.set_yticks(range(len(sizes[hook])), sizes[hook], fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(hook, loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("microseconds of a call")
    if len(results) > 1:
        panels[0].legend(fontsize=8, frameon=False)
    return figure


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else "-"


def main() -> None:
    """Write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args()
    mpl.rcParams["svg.fonttype"], mpl.rcParams["svg.hashsalt"] = "none", "hal"  # text as text, the same file each time
    figure = draw([json.loads(path.read_text(encoding="utf-8")) for path in given.results])
    figure.savefig(given.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
