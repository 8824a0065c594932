"""The table of returns: what runs reached, beside what CleanRL publishes, with the commands that give it.

python benchmarks/returns.py runs > benchmarks/returns.md

A run's figure is the mean of its last 100 training episodes, raw returns; a row's is the mean over seeds, ±
their standard deviation. Only completed runs count.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from rl import rundir

LAST = 100  # training episodes in a run's figure
REFERENCE = Path(__file__).with_name("reference_returns.yaml")


class Run(NamedTuple):
    """What the table needs of one completed run."""

    recipe: str
    env_id: str
    seed: int
    figure: float
    record: dict[str, Any]

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
        rows = csv.DictReader((file.parent / "episodes.csv").read_text().splitlines())
        returns = [float(row["return"]) for row in rows]
        recipe = OmegaConf.load(file.parent / ".hydra" / "hydra.yaml").hydra.runtime.choices.algo
        runs.append(Run(recipe, record["env_id"], record["seed"], statistics.mean(returns[-LAST:]), record))
    return sorted(runs, key=lambda run: run[:3])


def table(runs: list[Run]) -> str:
    """The figures in Markdown, a row for each recipe and env."""
    reference = OmegaConf.to_container(OmegaConf.load(REFERENCE))
    assert isinstance(reference, dict)
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.recipe, run.env_id].append(run)
    lines = [
        "| recipe | env | steps | return | each seed | CleanRL | minutes a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for (recipe, env_id), group in groups.items():
        figures = [run.figure for run in group]
        published = reference.get(recipe, {}).get(env_id)
        spread = f" ± {statistics.pstdev(figures):.1f}" if len(figures) > 1 else ""
        minutes = statistics.mean(run.record["train_seconds"] for run in group) / 60
        lines.append(
            f"| `{recipe}` | {env_id} | {group[0].record['env_steps']:,} "
            f"| **{statistics.mean(figures):.1f}{spread}** "
            f"| {', '.join(f'{run.seed}: {run.figure:.1f}' for run in group)} "
            f"| {'{mean:.1f} ± {std:.1f}'.format(**published) if published else '-'} | {minutes:.1f} |"
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
    """Print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="run directories, or folders above them")
    runs = completed_runs(parser.parse_args().folders)
    if not runs:
        raise SystemExit("no completed run below these folders")
    print("# Returns\n")
    print(
        f"Mean of the last {LAST} training episodes, ± the standard deviation over seeds; written by "
        "`python benchmarks/returns.py runs`.\n"
    )
    print(table(runs))
    print("\n## Commands\n")
    print(provenance(runs))


if __name__ == "__main__":
    main()
