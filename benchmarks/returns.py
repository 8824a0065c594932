"""Table and curves of returns: what runs reached, beside what CleanRL publishes, with the commands that give
it.

python benchmarks/returns.py runs     writes benchmarks/returns.md and benchmarks/returns.png

A run's figure is the mean of its last 100 training episodes, raw returns; a row's is the mean over seeds, ±
their standard deviation. Only completed runs count.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from rl import rundir, standing

LAST = 100  # training episodes in a run's figure
PAGE = Path(__file__).with_name("returns.md")
CURVES = PAGE.with_suffix(".png")
REFERENCE = Path(__file__).with_name("reference_returns.yaml")


class Run(NamedTuple):
    """What the table needs of one completed run."""

    recipe: str
    env_id: str
    seed: int
    episodes: np.ndarray
    """[E, 2]: env steps at the end of each training episode, and its raw return."""
    evaluations: np.ndarray
    """[V, 2]: env steps of each evaluation, and its mean return."""
    record: dict[str, Any]

    @property
    def figure(self) -> float:
        """The mean return of the last training episodes."""
        return float(self.episodes[-LAST:, 1].mean())

    @property
    def command(self) -> str:
        """The command line that began the run, from `launch.py` on."""
        words = self.record["starts"][0]["command"]
        start = next(i for i, word in enumerate(words) if word.endswith("launch.py"))
        return " ".join(["python launch.py", *(w for w in words[start + 1 :] if not w.startswith("hydra."))])


def completed_runs(folders: list[Path]) -> list[Run]:
    """Every completed run below the folders, by recipe, env and seed."""
    runs = []
    for file in (file for folder in folders for file in folder.rglob("run.json")):
        record = rundir.read(file.parent)
        if record["status"] != "completed":
            continue
        recipe = OmegaConf.load(file.parent / ".hydra" / "hydra.yaml").hydra.runtime.choices.algo
        rows = csv.DictReader((file.parent / "episodes.csv").read_text().splitlines())
        episodes = np.array([(float(row["env_steps"]), float(row["return"])) for row in rows])
        evaluated = standing.evaluations(file.parent).items()
        evaluations = np.array([(step, statistics.mean(returns)) for step, returns in evaluated])
        runs.append(Run(recipe, record["env_id"], record["seed"], episodes, evaluations, record))
    return sorted(runs, key=lambda run: run[:3])


def grouped(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """The runs of each recipe and env."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.recipe, run.env_id].append(run)
    return groups


def published() -> dict[str, dict[str, dict[str, float]]]:
    """CleanRL's `mean` and `std` by recipe and env."""
    reference = OmegaConf.to_container(OmegaConf.load(REFERENCE))
    assert isinstance(reference, dict)
    return reference  # type: ignore[return-value]  # its keys are strings


def draw(runs: list[Run], file: Path) -> None:
    """The curves, one plot for each recipe and env: a line a seed, dots its evaluations, CleanRL's figure
    dashed."""
    groups, reference, columns = grouped(runs), published(), 3
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="tight")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(groups) :]:
        ax.set_visible(False)
    for ax, ((recipe, env_id), group) in zip(axes.flat, groups.items(), strict=False):
        for run in group:
            # Each point is the mean of the `LAST` episodes up to it; fewer at the start.
            sums = np.cumsum(np.insert(run.episodes[:, 1], 0, 0.0))
            ends = np.arange(1, len(sums))
            starts = np.maximum(0, ends - LAST)
            means = (sums[ends] - sums[starts]) / (ends - starts)
            (line,) = ax.plot(run.episodes[:, 0], means, linewidth=1, label=f"seed {run.seed}")
            ax.plot(*run.evaluations.T, "o", markersize=4, color=line.get_color())
        if (figures := reference.get(recipe, {}).get(env_id)) is not None:
            ax.axhline(figures["mean"], color="grey", linestyle="--", linewidth=1, label="CleanRL")
        ax.set_title(f"{recipe}, {env_id}", fontsize=9)
        ax.set_xlabel("env steps", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.xaxis.get_offset_text().set_fontsize(8)
        ax.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        ax.legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=80)


def table(runs: list[Run]) -> str:
    """The figures in Markdown, a row for each recipe and env."""
    reference = published()
    lines = [
        "| recipe | env | steps | return | each seed | CleanRL | minutes a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for (recipe, env_id), group in grouped(runs).items():
        figures = [run.figure for run in group]
        theirs = reference.get(recipe, {}).get(env_id)
        spread = f" ± {statistics.pstdev(figures):.1f}" if len(figures) > 1 else ""
        minutes = statistics.mean(run.record["train_seconds"] for run in group) / 60
        lines.append(
            f"| `{recipe}` | {env_id} | {group[0].record['env_steps']:,} "
            f"| **{statistics.mean(figures):.1f}{spread}** "
            f"| {', '.join(f'{run.seed}: {run.figure:.1f}' for run in group)} "
            f"| {'{mean:.1f} ± {std:.1f}'.format(**theirs) if theirs else '-'} | {minutes:.1f} |"
        )
    return "\n".join(lines)


def provenance(runs: list[Run]) -> str:
    """The machine, the versions and the exact commands, each with its commit and wall time."""
    facts = runs[0].record["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['cpu']}, {facts['cores']} cores, one thread a run, two runs at a time; {versions}.", ""]
    for run in runs:
        commit = str(run.record["provenance"]["git"]["commit"])[:12]
        lines.append(f"    {run.command}  # commit {commit}, {run.record['train_seconds']:.0f} s")
    return "\n".join(lines)


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="run directories, or folders above them")
    runs = completed_runs(parser.parse_args().folders)
    if not runs:
        raise SystemExit("no completed run below these folders")
    page = [
        "# Returns",
        f"Mean of the last {LAST} training episodes, ± the standard deviation over seeds; written by "
        "`python benchmarks/returns.py runs`.",
        table(runs),
        "## Curves",
        f"Lines: the mean of the {LAST} training episodes up to each; dots: evaluations.",
        f"![Training return over env steps, a plot for each recipe and env]({CURVES.name})",
        "## Commands",
        provenance(runs),
    ]
    PAGE.write_text("\n\n".join(page) + "\n")
    draw(runs, CURVES)


if __name__ == "__main__":
    main()
