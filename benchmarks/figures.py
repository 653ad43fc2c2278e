"""Every figure of docs/figures that is drawn, from what was measured: benchmarks/results holds the numbers.

    make figures               python benchmarks/figures.py                draws all of them, in seconds
    make figures MEASURE=1     python benchmarks/figures.py --measure      first measures the README's anew, ten minutes

    figure            numbers                                measured by                   shown in
    promise           drift.json, kills.json                 drift.py, kills.py            README, light and dark
    terminal          terminal.txt                           terminal.py                   README
    scaling           scaling.json                           scaling.py                    benchmarks.md
    shaped_network    shaped_network.json                    shaped_network.py, as root    benchmarks.md
    slow_network      slow_network.json                      slow_network.py, as root      benchmarks.md
    mesh              mesh.json                              mesh.py                       concepts/mesh.md
    staleness         staleness.json                         staleness.py                  concepts/parameter_server.md
    simulated         shaped_network.json, published.toml    simulated.py                  concepts/simulate.md

Numbers that stand in a page's table are those of the table; tests/benchmarks/test_figures.py compares them.
tensorboard.png and training_in_a_terminal.png are photographs of a screen and are not drawn here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import mesh
import scaling
import shaped_network
import simulated
import slow_network
import staleness

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURES = HERE.parent / "docs" / "figures"


@dataclass(frozen=True)
class Theme:
    """Colours for a page's background."""

    suffix: str
    text: str
    faint: str
    ours: str
    peers: tuple[str, str, str]

    @property
    def settings(self) -> dict[str, Any]:
        """matplotlib's; pages show through, and the same numbers give the same file."""
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        return dict.fromkeys(names, self.text) | {
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "grid.color": self.faint,
            "svg.hashsalt": "paceline",
            "font.size": 11,
        }


LIGHT = Theme("", "#1f2328", "#d0d7de", "#0969da", ("#f0a35e", "#e0702a", "#a83c09"))
DARK = Theme("-dark", "#e6edf3", "#3d444d", "#58a6ff", ("#ffd8a8", "#f69d50", "#e8590c"))


def numbers(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


# -- the README's picture ----------------------------------------------------------------------------------------------


def promise(theme: Theme, file: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(theme.settings):
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.25), wspace=0.06)
        left, above = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
        below = figure.add_subplot(grid[1, 1], sharex=above, sharey=above)
        draw_drift(left, theme, numbers("drift.json"))
        told = numbers("kills.json")
        draw_kills(above, theme.ours, "paceline run --elastic", told, "paceline")
        draw_kills(below, theme.peers[1], "torchrun, restarted from its last checkpoint", told, "torchrun")
        above.tick_params(labelbottom=False)
        above.set_title("Tokens/s while three workers are killed", loc="left", fontsize=12, weight="bold")
        below.set(xlabel="seconds since the first step")
        for panel in (left, above, below):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", linewidth=0.6)
            panel.set_axisbelow(True)
        figure.savefig(file, metadata={"Date": None})


ZERO_BELOW = 2e-6
"""Below it the axis is linear, so that zero has a place on it."""


def draw_drift(panel: Any, theme: Theme, told: dict[str, Any]) -> None:
    for colour, (workers, rows) in zip(theme.peers, list(told["most"]["torch-ddp"].items())[1:], strict=True):
        steps, most = zip(*rows, strict=True)
        panel.plot(steps, most, color=colour, linewidth=2, label=f"torch DDP, {workers} workers")
    for rows in told["most"]["paceline"].values():
        steps, most = zip(*rows, strict=True)
        panel.plot(steps, most, color=theme.ours, linewidth=4, solid_capstyle="round", clip_on=False)
    panel.annotate(
        "paceline, 2, 3 and 4 workers: 0", (steps[-1], 0), (0, 9), textcoords="offset points",
        ha="right", color=theme.ours, weight="bold",
    )  # fmt: skip
    panel.set_yscale("symlog", linthresh=ZERO_BELOW, linscale=0.6)
    panel.set_ylim(0, 0.1)
    panel.set_yticks([0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    panel.minorticks_off()
    panel.set_xlim(0, steps[-1])
    panel.set(xlabel="step")
    panel.set_title("Largest difference from one worker's weights", loc="left", fontsize=12, weight="bold")
    panel.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.17), fontsize=10)


BIN_S = 1.0


def draw_kills(panel: Any, colour: str, label: str, told: dict[str, Any], name: str) -> None:
    """Filled: steps that count. Hatched: steps that had been done before."""
    run = told["runs"][name]
    times, new, every = speeds(run, told["tokens_per_step"])
    panel.fill_between(times, new, step="post", color=colour, alpha=0.3, linewidth=0)
    panel.step(times, new, where="post", color=colour, linewidth=1.8)
    if every != new:
        panel.fill_between(
            times, new, every, step="post", facecolor="none", edgecolor=colour, hatch="/////", linewidth=0
        )
        panel.annotate(
            "hatched: steps done again", (0.995, 0.84), xycoords="axes fraction", ha="right", va="top",
            fontsize=9, color=colour,
        )  # fmt: skip
    for when in run["kills_s"]:
        panel.axvline(when, ymax=0.8, color=panel.xaxis.label.get_color(), linewidth=1, linestyle=":")
        panel.text(when, 0.82, "kill -9", transform=panel.get_xaxis_transform(), ha="center", fontsize=9)
    end = run["steps"][-1]
    panel.annotate(
        f"{label}: {end[1]} steps in {end[0]:.0f} s", (0.995, 0.99), xycoords="axes fraction", ha="right", va="top",
        color=colour, weight="bold",
    )  # fmt: skip
    done = max(max(speeds(one, told["tokens_per_step"])[2]) for one in told["runs"].values())
    panel.set_ylim(0, 1.45 * done)
    panel.set_xlim(0, max(run["steps"][-1][0] for run in told["runs"].values()) + 2 * BIN_S)
    panel.yaxis.set_major_formatter("{x:,.0f}")


def speeds(run: dict[str, Any], tokens: int) -> tuple[list[float], list[float], list[float]]:
    """(begins of bins, tokens/s of steps that were not done before, tokens/s of all steps)

    A step's tokens are spread over the time since the one before.
    """
    count = int(run["steps"][-1][0] / BIN_S) + 2
    new, every, reached = [0.0] * count, [0.0] * count, run["steps"][0][1]
    for (begun, _), (ended, step) in pairwise(run["steps"]):
        for number in range(int(begun / BIN_S), int(ended / BIN_S) + 1):
            inside = min(ended, BIN_S * (number + 1)) - max(begun, BIN_S * number)
            rate = tokens * inside / (ended - begun) / BIN_S
            every[number] += rate
            new[number] += rate if step > reached else 0.0
        reached = max(reached, step)
    return [BIN_S * number for number in range(count)], new, every


# -- the README's terminal ---------------------------------------------------------------------------------------------

# rich's own format loads fonts from the network; a page's own fixed-width one does as well.
SVG = """<svg class="rich-terminal" viewBox="0 0 WIDTH HEIGHT" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
<rect fill="#161b22" x="0" y="0" width="WIDTH" height="HEIGHT" rx="10"/>
<g transform="translate(20, 14)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def terminal(file: Path) -> None:
    import io

    from rich.console import Console
    from rich.text import Text

    said = (RESULTS / "terminal.txt").read_text().splitlines()
    columns = max(map(len, said))
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    for line in said:
        console.print(Text(line, style=_style(line)), no_wrap=True, crop=True)
    size = {"WIDTH": 12.2 * columns + 40, "HEIGHT": 24.4 * len(said) + 32}  # rich's characters are 12.2 by 24.4
    frame = reduce(lambda text, side: text.replace(side, f"{size[side]:.0f}"), size, SVG)
    file.write_text(console.export_svg(code_format=frame, unique_id="terminal", font_aspect_ratio=0.61))


def _style(line: str) -> str:
    if line.startswith("$ "):
        return "bold #e6edf3"
    if line.startswith("# "):
        return "bold #f69d50"
    if "weights" in line:
        return "bold #7ee787"
    return "#ffc58a" if "worker" in line else "#9198a1"


# -- those of the pages ------------------------------------------------------------------------------------------------


def slow_sums(file: Path) -> None:
    """The table's medians beside the formulas. Bytes were counted, and were the formula's to the byte."""
    told = numbers("shaped_network.json")
    trial = shaped_network.Trial(tuple(told["hosts"]))
    rows = []
    for name, seconds in told["seconds"].items():
        way = shaped_network.WAYS[name]
        for hosts, median in zip(told["hosts"], seconds, strict=True):
            nbytes = round(way.busiest(hosts) * told["tensor_bytes"])
            theory = way.turns * nbytes / trial.bytes_per_s
            rows.append(
                {"algorithm": name, "hosts": hosts, "seconds": median, "seconds_by_theory": theory}
                | {"busiest_bytes": nbytes, "bytes_by_theory": nbytes}
            )
    result = {"trial": {"hosts": told["hosts"], "mbit": trial.mbit}, "tensor_bytes": told["tensor_bytes"], "rows": rows}
    shaped_network.plot(result, file)


PAGES: dict[str, Callable[[Path], None]] = {
    "scaling": lambda file: scaling.plot(numbers("scaling.json"), file),
    "shaped_network": slow_sums,
    "slow_network": lambda file: slow_network.plot(numbers("slow_network.json"), file),
    "mesh": lambda file: mesh.draw(numbers("mesh.json")["rows"], file),
    "staleness": lambda file: staleness.draw(staleness.by_cell(numbers("staleness.json")["rows"]), file),
    "simulated": simulated.plot,
}


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for theme in (LIGHT, DARK):
        promise(theme, folder / f"promise{theme.suffix}.svg")
    terminal(folder / "terminal.svg")
    for name, drawn in PAGES.items():
        drawn(folder / f"{name}.png")


MEASURED = {
    "drift.py": ("--json", "drift.json"),
    "kills.py": ("--json", "kills.json"),
    "terminal.py": ("--text", "terminal.txt"),
}


def measure() -> None:
    for script, (option, name) in MEASURED.items():
        subprocess.run([sys.executable, str(HERE / script), option, str(RESULTS / name)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="first measure what the README's figures show")
    parser.add_argument("--folder", type=Path, default=FIGURES, help="where they go")
    asked = parser.parse_args()
    if asked.measure:
        measure()
    draw(asked.folder)


if __name__ == "__main__":
    main()
