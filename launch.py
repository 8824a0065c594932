"""Train from the command line: compose the configuration, check it, build the experiment, run it.

python launch.py                                    PPO on CartPole-v1
python launch.py algo=ppo_continuous_action seed=3  a recipe, with an override
python launch.py --help                             groups and keys
"""

import os
import sys

import hydra
from omegaconf import DictConfig

from rl import commandline


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float | None:
    """One job, single or of a sweep: returns the objective, the mean return of the final evaluation."""
    from rl.job import run_job

    return run_job(cfg)


def main() -> None:
    """Check the command line, then let Hydra run it; a wrong configuration is one line and exit code 2."""
    os.environ.setdefault(
        "HYDRA_FULL_ERROR", "1"
    )  # errors come to us whole: one line for the user's, a traceback for ours
    arguments = sys.argv[1:]
    with commandline.plain_errors(arguments):
        sys.argv[1:], begun = commandline.prepare(arguments)
        with begun:
            run()


if __name__ == "__main__":
    main()
