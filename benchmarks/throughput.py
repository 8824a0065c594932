"""Training throughput against Stable-Baselines3: same environment, hyperparameters and machine, in turn.

python benchmarks/throughput.py                                    every workload, three rounds
python benchmarks/throughput.py ppo --steps 51200 --rounds 5       one of them, shorter and more often
python benchmarks/throughput.py --threads 1 --json figures.json    one thread for both; keep the raw figures
python benchmarks/throughput.py ppo_atari --ours precision=bf16    an override of our side

Each measurement is a process of its own, and the two sides take turns, so that what else the machine does
hits both. Both figures are env steps over the wall seconds of the training call, without imports and process
start: for SB3 `model.learn()`, silent and with nothing written; for us the `train_seconds` of run.json, which
hold the evaluations, logging and checkpoints that a run does by default.

Taking turns is not enough on a busy machine: torch threads wait for each other, so where other processes hold
the cores, a side with two threads loses several times more than a side with one, and the ratio says nothing
about the programs. The load is kept with each measurement, and a warning printed; `--threads 1` is the fairer
comparison for networks this small, and the one to quote together with the default.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("ours", "sb3")
BUSY = 0.3  # cores that others may use before the figures stop meaning anything


@dataclass(frozen=True)
class Measurement:
    """Env steps trained, the wall seconds that they took, and how busy others kept the machine before."""

    steps: int
    seconds: float
    load: float = 0.0
    """Cores that other processes kept busy just before the start (see `busy`)."""

    @property
    def rate(self) -> float:
        """Env steps per second."""
        return self.steps / self.seconds


@dataclass
class Result:
    """Every measurement of one workload, in the order of the rounds."""

    ours: list[Measurement] = field(default_factory=list)
    sb3: list[Measurement] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """Our rate over SB3's in each round that has both."""
        return [ours.rate / sb3.rate for ours, sb3 in zip(self.ours, self.sb3, strict=False)]


def sb3_train(workload: Workload, steps: int, seed: int) -> Measurement:
    """Train with SB3 in this process; the seconds are those of `learn()`."""
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

    kwargs = dict(workload.sb3_kwargs)
    learning_rate = kwargs.pop("learning_rate")
    policy_kwargs = {
        "net_arch": kwargs.pop("net_arch"),
        "activation_fn": getattr(torch.nn, kwargs.pop("activation", "Tanh")),
        "optimizer_kwargs": {"eps": kwargs.pop("adam_eps", 1e-8)},
    }
    if "n_critics" in kwargs:
        policy_kwargs["n_critics"] = kwargs.pop("n_critics")
    envs: VecEnv
    if workload.atari:
        import ale_py  # noqa: F401  registers the games

        envs = VecFrameStack(make_atari_env(workload.env_id, n_envs=workload.num_envs, seed=seed), 4)
    else:
        envs = make_vec_env(workload.env_id, n_envs=workload.num_envs, seed=seed)  # a DummyVecEnv
    if workload.normalize:
        envs = VecNormalize(envs, gamma=kwargs["gamma"], clip_obs=10.0, clip_reward=10.0)
    if "action_noise" in kwargs:
        size = envs.action_space.shape[0]  # type: ignore[index]
        kwargs["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, kwargs["action_noise"]))
    model = getattr(stable_baselines3, workload.sb3_class)(
        env=envs,
        learning_rate=(lambda left: left * learning_rate) if workload.anneal_lr else learning_rate,
        policy_kwargs=policy_kwargs,
        seed=seed,
        device="cpu",
        **kwargs,
    )
    start = time.perf_counter()
    model.learn(total_timesteps=steps)
    seconds = time.perf_counter() - start
    envs.close()
    return Measurement(model.num_timesteps, seconds)


def measure_sb3(name: str, steps: int, seed: int, environment: dict[str, str]) -> Measurement:
    """Train with SB3 in a new process, which is this script again (see `main`)."""
    script = str(Path(__file__).resolve())
    worker = [sys.executable, script, name, "--steps", str(steps), "--sb3-worker", str(seed)]
    output = run(worker, environment)
    return Measurement(**json.loads(output.splitlines()[-1]))


def measure_ours(
    name: str, steps: int, seed: int, environment: dict[str, str], ours: Sequence[str] = ()
) -> Measurement:
    """Train with `launch.py` into a temporary run directory and read what its run.json says."""
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        overrides = [
            f"algo={name}",
            *WORKLOADS[name].overrides,
            *ours,
            f"total_timesteps={steps}",
            f"seed={seed}",
            "device=cpu",
            f"hydra.run.dir={folder}/run",
        ]
        run([sys.executable, "launch.py", *overrides], environment)
        record = json.loads(next(Path(folder).rglob("run.json")).read_text())
        return Measurement(record["env_steps"], record["train_seconds"])


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run `command` from the root and give its standard output; raises SystemExit with its last words."""
    process = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if process.returncode != 0:
        last_words = "\n".join((process.stdout + process.stderr).splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)}\nleft with exit code {process.returncode}:\n{last_words}")
    return process.stdout


def machine(threads: int | None) -> dict[str, str]:
    """What the figures depend on: processor, cores, threads, versions."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    packages = ("torch", "stable-baselines3", "gymnasium", "mujoco", "numpy")
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": f"OMP_NUM_THREADS={threads}" if threads else "as each side chooses",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def busy(seconds: float = 1.0) -> float:
    """Cores that other processes keep busy, looked at for `seconds`: 0.0 on an idle machine."""
    return psutil.cpu_percent(interval=seconds) / 100 * (os.cpu_count() or 1)


def version(package: str) -> str:
    """The installed version of `package`, or a word that it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(results: dict[str, Result]) -> Table:
    """One row a workload: steps/s of each side and the ratios of the rounds, all as median (min–max)."""
    rows = Table("workload", "environment", "ours, steps/s", "SB3, steps/s", "ratio", title="Throughput")
    for name, result in results.items():
        ratio = spread(result.ratios(), ".2f")
        rows.add_row(name, WORKLOADS[name].env_id, *(rates(result, side) for side in SIDES), ratio)
    return rows


def rates(result: Result, side: str) -> str:
    """The steps/s of one side, for a cell of the table."""
    return spread([measurement.rate for measurement in getattr(result, side)], ",.0f")


def spread(values: Sequence[float], form: str) -> str:
    """`median (min–max)`, or a dash where there is nothing."""
    if not values:
        return "–"
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog=f"workloads: {', '.join(WORKLOADS)}"
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="which ones (default: all)")
    parser.add_argument("--steps", type=int, help="env steps a measurement (default: the workload's own)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements a side (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides (default: not set)")
    parser.add_argument(
        "--ours", action="append", default=[], metavar="KEY=VALUE", help="an override of our side, repeatable"
    )
    parser.add_argument("--side", choices=SIDES, help="measure one side alone (default: both, in turn)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the raw figures to FILE")
    parser.add_argument("--sb3-worker", type=int, metavar="SEED", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or list(WORKLOADS)
    for name in options.workloads:
        if name not in WORKLOADS:
            parser.error(f"no workload {name!r}; there are: {', '.join(WORKLOADS)}")
    for key in ("steps", "rounds", "threads"):
        if (value := getattr(options, key)) is not None and value < 1:
            parser.error(f"--{key} must be at least 1, not {value}")
    if options.side != "ours" and importlib.util.find_spec("stable_baselines3") is None:
        parser.error("Stable-Baselines3 is not installed: pip install -e '.[bench]'")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the raw figures."""
    options = parse(arguments)
    if options.sb3_worker is not None:
        (name,) = options.workloads
        print(json.dumps(asdict(sb3_train(WORKLOADS[name], options.steps, options.sb3_worker))))
        return

    console = Console()
    facts = machine(options.threads)
    for key, value in facts.items():
        console.print(f"{key:>18}  {value}", highlight=False)
    environment = dict(os.environ)
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if options.ours:
        console.print(f"{'ours':>18}  {' '.join(options.ours)}", highlight=False)
    measure: dict[str, Callable[..., Measurement]] = {
        "ours": partial(measure_ours, ours=options.ours),
        "sb3": measure_sb3,
    }
    results: dict[str, Result] = {}
    for name in options.workloads:
        results[name] = Result()
        steps = options.steps or WORKLOADS[name].steps
        for round_ in range(1, options.rounds + 1):
            for side in (options.side,) if options.side else SIDES:
                load = busy()
                measurement = replace(measure[side](name, steps, round_, environment), load=load)
                getattr(results[name], side).append(measurement)
                line = f"{name} round {round_} {side}: {measurement.rate:,.0f} steps/s"
                console.print(line, f"({load:.1f} cores were busy before)", highlight=False)
    console.print(table(results))
    loads = [m.load for result in results.values() for m in (*result.ours, *result.sb3)]
    if max(loads) > BUSY:
        console.print(
            f"[yellow]Not to be quoted: other processes kept up to {max(loads):.1f} of {os.cpu_count()} "
            "cores busy, which costs the side with more threads most. Measure again on an idle machine."
        )
    if options.json:
        raw = {name: asdict(result) | {"ratios": result.ratios()} for name, result in results.items()}
        options.json.write_text(json.dumps({"machine": facts, "workloads": raw}, indent=2) + "\n")


if __name__ == "__main__":
    main()
