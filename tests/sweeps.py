"""What the tests of sweeps share: an env whose pace they set, and how a sweep's jobs stand."""

from __future__ import annotations

from pathlib import Path

from rl.launchers.sweep import Sweep

PACED = """
import time
from pathlib import Path
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Paced(CartPoleEnv):
    "CartPole whose steps take the seconds in the file `pace`, to be replaced whole; with `bad`, it breaks."
    def __init__(self, pace=None, bad=False, **kwargs):
        super().__init__(**kwargs)
        self.pace, self.bad, self.count = pace, bad, 0
    def step(self, action):
        self.count += 1
        if self.bad and self.count > 100:
            raise RuntimeError("the pole broke")
        if self.pace is not None:
            time.sleep(float(Path(self.pace).read_text()))
        return super().step(action)

gym.register("Paced-v0", Paced, max_episode_steps=500)
"""


def write_paced(folder: Path) -> dict[str, str]:
    """Put a user's module `paced` into a new folder; the environment variables with which it is found."""
    folder.mkdir()
    (folder / "paced.py").write_text(PACED)
    return {"PYTHONPATH": str(folder)}


def only_sweep(folder: Path) -> Sweep:
    """The one sweep that was started in `folder`."""
    (found,) = folder.glob("multirun/*/*")
    return Sweep(found)


def states(sweep: Sweep) -> list[str]:
    """The states of its jobs, by their numbers."""
    return [job.state for job in sweep.jobs().values()]


def history(sweep: Sweep, number: int = 0) -> list[str]:
    """The states that a job has been in, in order."""
    return [event["state"] for event in sweep.ledger.events() if event["job"] == number]
