"""The `rl` command: look at runs and sweeps, and evaluate runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rl import checkpoint
from rl.errors import ConfigError
from rl.launchers import commands
from rl.standing import standing

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Look at runs and sweeps, and evaluate runs.",
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="a run directory, or a checkpoint inside it")
]


@app.command("eval")
def evaluate(
    run: RunArgument,
    episodes: Annotated[int, typer.Option(min=1, help="how many episodes")] = 10,
    deterministic: Annotated[
        bool, typer.Option("--deterministic/--sampled", help="the policy's mode, or samples")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="of the envs and of sampled actions")] = 0,
    video: Annotated[bool, typer.Option("--video", help="film every episode, at most 16")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N")] = "cpu",
) -> None:
    """Play episodes with the policy in a run's newest checkpoint, also while the run trains."""
    from rl.resume import locate

    directory, path = locate(str(run), key="RUN")
    result = evaluate_checkpoint(
        path, episodes, deterministic, seed, device, videos=(directory or path) / "videos" if video else None
    )
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    table = Table("episode", "return", "length", box=None)
    for episode in result["episodes"]:
        table.add_row(str(episode["episode"]), f"{episode['return']:.2f}", str(episode["length"]))
    console.print(table)
    how = "deterministic" if deterministic else "sampled"
    console.print(
        f"{result['env_id']} at step {result['env_steps']:,}: return {result['mean']:.2f} ± "
        f"{result['std']:.2f} "
        f"over {episodes} {how} episodes"
    )
    for file in result["videos"]:
        console.print(file, soft_wrap=True)


def evaluate_checkpoint(
    path: Path, episodes: int, deterministic: bool, seed: int, device_name: str, videos: Path | None
) -> dict[str, Any]:
    """Evaluate the policy in the checkpoint at `path` from that folder alone; the figures as JSON values.

    Args:
        videos: the folder to film into, None for no video.
    """
    from rl.config import check, check_device, check_spaces, register_schema

    register_schema()
    check_device(device_name)
    state, manifest = checkpoint.load(path, rings=False)
    saved = {**manifest["config"], "capture_video": videos is not None, "device": device_name, "logger": {}}
    if "buffer_size" in saved["algo"]:  # nothing is replayed
        saved["algo"] = {
            **saved["algo"],
            "buffer_size": saved["algo"]["batch_size"] + saved["env"]["num_envs"],
        }
    config = check(saved)
    check_spaces(config)
    config.env = config.env.smallest()

    import numpy as np

    from rl import build, evaluation
    from rl.seeding import Streams

    algo = build.build_algorithm(config, Streams(seed), build.device(device_name))
    try:
        build.load_weights(algo, state)
        name = f"eval_step_{manifest['env_steps']:09d}_seed_{seed}"
        films = (
            {n: videos / f"{name}_episode_{n}.mp4" for n in range(min(episodes, evaluation.MOST_ENVS))}
            if videos
            else {}
        )
        played = evaluation.evaluate(
            algo.policy(),
            config.env,
            Streams(seed).sequence("evaluation"),
            episodes=episodes,
            deterministic=deterministic,
            videos=films,
        )
    finally:
        algo.close()
    assert played is not None
    returns = np.array([episode.episodic_return for episode in played])
    return {
        "checkpoint": str(path),
        "env_id": config.env.id,
        "env_steps": manifest["env_steps"],
        "deterministic": deterministic,
        "seed": seed,
        "mean": float(returns.mean()),
        "std": float(returns.std()),
        "episodes": [{"episode": e.episode, "return": e.episodic_return, "length": e.length} for e in played],
        "videos": [str(file) for file in films.values()],
    }


@app.command()
def show(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run directory, or a folder above several")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object (or list) on stdout")] = False,
) -> None:
    """Say what a run is and how it stands; for a folder above several runs, a line each."""
    if not run.is_dir():
        raise ConfigError(f"RUN={run}: there is no such folder; runs are below runs/<day>/")
    if (run / "run.json").exists():
        facts = standing(run)
        print(json.dumps(facts)) if as_json else _print_run(facts)
        return
    runs = [standing(file.parent) for file in sorted(run.rglob("run.json"))]
    if not runs:
        raise ConfigError(f"RUN={run}: neither a run nor a folder above runs (there is no run.json in it)")
    print(json.dumps(runs)) if as_json else _print_list(runs)


def _print_run(facts: dict[str, Any]) -> None:
    provenance = facts.get("provenance", {})
    git = provenance.get("git") or {}
    total = facts.get("total_timesteps") or 0
    rows = {
        "run": facts["directory"],
        "status": facts["status"] + (f": {facts['error']}" if facts.get("error") else ""),
        "what": f"{facts.get('algo')} on {facts.get('env_id')}, seed {facts.get('seed')}, device "
        f"{facts.get('device')}",
        "step": f"{facts['env_steps']:,} of {total:,}"
        + (f" ({facts['env_steps'] / total:.0%})" if total else ""),
        "rate": f"{facts['SPS']:,.0f} steps/s" if facts.get("SPS") else "-",
        "return": f"{facts['recent_return']:.2f} over the last {min(100, facts['episodes'])} of "
        f"{facts['episodes']:,} training episodes"
        if facts["recent_return"] is not None
        else "no episode has finished",
        "evaluations": ", ".join(
            f"{steps:,}: {value:.2f}" for steps, value in list(facts["evaluations"].items())[-5:]
        )
        or "-",
        "objective": f"{facts['result']['objective']:.2f}" if facts.get("result") else "-",
        "checkpoints": ", ".join(facts["checkpoints"]) or "-",
        "videos": f"{len(facts['videos'])} in {facts['directory']}/videos" if facts["videos"] else "-",
        "starts": "; ".join(f"{s['time']} at step {s['env_steps']:,}" for s in facts.get("starts", [])),
        "notes": "; ".join(note for s in facts.get("starts", []) for note in s["notes"]) or "-",
        "code": f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}",
        "command": " ".join(provenance.get("command", [])),
        "host": f"{facts.get('host')}, process {facts.get('pid')}",
        "tags": ", ".join(facts.get("tags", [])) or "-",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    if facts["status"] not in ("completed", "running"):
        print(f"\ncontinue with: python launch.py resume={facts['directory']}")


def _print_list(runs: list[dict[str, Any]]) -> None:
    table = Table("run", "status", "algo", "env", "seed", "step", "return", "objective", box=None)
    table.columns[0].overflow = "fold"  # a path cut short could not be copied
    for facts in runs:
        objective = facts["result"]["objective"] if facts.get("result") else None
        values = (facts["recent_return"], objective)
        table.add_row(
            *(str(facts.get(key)) for key in ("directory", "status", "algo", "env_id", "seed")),
            f"{facts['env_steps']:,}",
            *("-" if v is None else f"{v:.1f}" for v in values),
        )
    Console().print(table)


for command in (commands.status, commands.logs, commands.cancel, commands.collect):
    app.command()(command)


def main() -> None:
    """Entry point of the console script: a user's mistake is one line and exit code 2."""
    try:
        app()
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
