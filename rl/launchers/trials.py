"""The trials of an Optuna study: the loop that chooses them, follows their jobs, and ends them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl import rundir
from rl.errors import ConfigError
from rl.launchers.display import SweepDisplay
from rl.launchers.ledger import STOPPED, Job
from rl.launchers.search_space import Search, assignment
from rl.launchers.sweep_launcher import SweepLauncher, SweepSignals
from rl.standing import evaluations

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial


@dataclass
class Active:
    """A trial whose jobs are running or in line, and the steps whose means Optuna has been told."""

    trial: Trial
    numbers: list[int]
    reported: set[int] = field(default_factory=set)
    verdict: Literal["completed", "pruned", "failed"] | None = None
    value: float | None = None
    why: str = ""


class Trials:
    """The trials of a study, and the loop that chooses, follows and ends them.

    Args:
        study: where the trials are kept.
        search: the values to search, the fixed ones and the seeds.
        launcher: runs the jobs.
        n_trials: how many trials the study is to have; one that an interruption ended does not count.
        parallel: trials at a time.
    """

    def __init__(
        self, study: Study, search: Search, launcher: SweepLauncher, n_trials: int, parallel: int
    ) -> None:
        self.study, self.search, self.launcher = study, search, launcher
        self.n_trials, self.parallel = n_trials, parallel
        self.sweep, self.config = launcher.sweep, launcher.config
        self.active: list[Active] = []
        self.private = True
        """Whether no other sweep can have trials in the study."""
        self.failed_fast = False
        self._stopping = False

    def follow(self) -> int | None:
        """Run trials until there are `n_trials`; the number of the signal that stopped them, if one did."""
        self.launcher.settle()
        total = range(self.n_trials * len(self.search.seeds))
        display = SweepDisplay(self.sweep, total)
        with self.sweep.led(), SweepSignals() as signals, display as self.display:
            if not self.launcher.waits:
                self.display.say("this process chooses the trials: it stays until the last has ended")
            self._take_up()
            while True:
                while not self._stopping and len(self.active) < self.parallel and self.remaining() > 0:
                    self._begin()
                if not self._unfinished() and (self._stopping or not self.active):
                    break
                self.launcher.poll()
                jobs = self.sweep.jobs()
                self.display.update(list(jobs.values()))
                if signals.take():
                    self._stopping = True
                    assert signals.requested is not None
                    self.launcher.stop(self._unfinished(), signals.requested)
                    jobs = self.sweep.jobs()
                for active in list(self.active):
                    self._attend(active, jobs)
        return signals.requested

    def remaining(self) -> int:
        """How many trials are still to be chosen."""
        trials = self.study.get_trials(deepcopy=False)
        repeated = {trial.user_attrs.get("retry_of") for trial in trials}
        counted = [
            trial
            for trial in trials
            if trial.state.name != "WAITING"
            and "interrupted" not in trial.user_attrs
            and trial.number not in repeated
        ]
        return self.n_trials - len(counted)

    def _take_up(self) -> None:
        """Go on with the trials that an earlier command left running; put failed ones in line again where
        `retry_failed` asks for it."""
        from optuna.trial import Trial

        jobs = self.sweep.jobs()
        trials = self.study.get_trials(deepcopy=False)
        repeated = {trial.user_attrs.get("retry_of") for trial in trials}
        for frozen in trials:
            numbers = frozen.user_attrs.get("jobs", [])
            mine = frozen.user_attrs.get("sweep") == self.sweep.folder.name
            if frozen.state.name == "RUNNING" and mine and set(numbers) <= jobs.keys():
                trial = Trial(self.study, frozen._trial_id)
                self._run(Active(trial, numbers, set(frozen.intermediate_values)), jobs)
            elif frozen.state.name == "RUNNING" and (mine or self.private):
                self._void(Trial(self.study, frozen._trial_id))
            elif (
                frozen.state.name == "FAIL"
                and self.config.retry_failed
                and "interrupted" not in frozen.user_attrs
                and frozen.number not in repeated
            ):
                self.study.enqueue_trial(frozen.params, user_attrs={"retry_of": frozen.number})

    def _begin(self) -> None:
        """Choose a trial, freeze its jobs and put them in line."""
        trial = self.study.ask(self.search.distributions)
        shared = [*self.search.fixed, *(assignment(key, value) for key, value in trial.params.items())]
        try:
            jobs = [self.launcher.job([*shared, f"seed={seed}"]) for seed in self.search.seeds]
        except ConfigError as error:  # these values do not go together
            self._end(Active(trial, [], verdict="failed", why=str(error)), {})
            return
        except BaseException:
            self._void(trial)
            raise
        trial.set_user_attr("sweep", self.sweep.folder.name)
        trial.set_user_attr("jobs", [job.number for job in jobs])
        self._run(Active(trial, [job.number for job in jobs]), self.sweep.jobs())

    def _run(self, active: Active, jobs: Mapping[int, Job]) -> None:
        """Start those of a trial's jobs that are due; one that another trial has too is in line already."""
        busy = {number for other in self.active for number in other.numbers}
        due = [jobs[n] for n in active.numbers if n not in busy and self.launcher.is_due(jobs[n])]
        self.active.append(active)
        self.launcher.start(due)

    def _void(self, trial: Trial) -> None:
        """End a trial that was cut off before it had jobs."""
        from optuna.trial import TrialState

        trial.set_user_attr("interrupted", True)
        self.study.tell(trial, state=TrialState.FAIL)

    def _unfinished(self) -> list[Job]:
        """The jobs of active trials that run or are in line."""
        numbers = {number for active in self.active for number in active.numbers}
        return self.launcher.unfinished([job for n, job in self.sweep.jobs().items() if n in numbers])

    def _attend(self, active: Active, jobs: Mapping[int, Job]) -> None:
        """Decide on a trial if it is time, stop the jobs of one that is decided, and end it after them."""
        mine = [jobs[number] for number in active.numbers]
        running = self.launcher.unfinished(mine)
        if active.verdict is None:
            self._judge(active, mine, {job.number for job in running})
            if active.verdict is not None and running:
                self.launcher.stop(running)
        if active.verdict is not None and not self.launcher.unfinished(mine):
            self.active.remove(active)
            self._end(active, self.sweep.jobs())

    def _judge(self, active: Active, mine: Sequence[Job], running: set[int]) -> None:
        """Set the trial's verdict where its jobs allow one."""
        for job in mine:
            if job.number in running or (job.state == "completed" and _finite(job.objective)):
                continue
            if self._stopping and job.state in ("pending", *STOPPED):
                return  # a continued study goes on with it
            active.verdict = "pruned" if job.state == "pruned" else "failed"
            what = f"objective {job.objective}" if job.state == "completed" else job.error or "see output.txt"
            active.why = f"job {job.number} {job.state}: {what}"
            return
        if not running:
            objectives = [job.objective for job in mine if job.objective is not None]
            active.verdict, active.value = "completed", sum(objectives) / len(objectives)
        elif self._falls_behind(active, mine) and not self._stopping:
            active.verdict = "pruned"
            active.why = f"at step {max(active.reported):,}"

    def _falls_behind(self, active: Active, mine: Sequence[Job]) -> bool:
        """Tell Optuna the means of evaluations that all seeds have by now; whether the trial is to be pruned
        at one of them, of which several may have come since the last look."""
        means = mean_evaluations(
            [job.path for job in mine], self.config.eval.every, self.config.eval.episodes
        )
        for step in sorted(means.keys() - active.reported):
            active.trial.report(means[step], step)
            active.reported.add(step)
            if active.trial.should_prune():
                return True
        return False

    def _end(self, active: Active, jobs: Mapping[int, Job]) -> None:
        """Tell Optuna how a trial ended, and the ledger which jobs were pruned."""
        from optuna.trial import TrialState

        trial, line = active.trial, f"trial {active.trial.number} {active.verdict}"
        if active.verdict == "completed":
            self.study.tell(trial, active.value)
            self.display.say(f"{line}: mean {active.value:,.2f}", "green")
            return
        if active.verdict == "pruned":
            for number in active.numbers:
                if jobs[number].state == "pending" or jobs[number].state in STOPPED:
                    self.sweep.ledger.append(number, "pruned", error=None)
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("error", active.why)
            self.study.tell(trial, state=TrialState.FAIL)
            if self.config.fail_fast and not self._stopping:
                self.failed_fast = self._stopping = True
                self.launcher.stop(self._unfinished())
        self.display.say(f"{line}: {active.why}", "blue" if active.verdict == "pruned" else "bold red")


def mean_evaluations(runs: Sequence[Path], every: int, episodes: int) -> dict[int, float]:
    """Mean return over runs and episodes of each periodic evaluation that all the runs have, by the multiple
    of `every` (env steps) that was due: the steps themselves depend on the size of a rollout. The final
    evaluation is the objective, and not among them."""
    by_run: list[dict[int, float]] = []
    for run in runs if every > 0 else ():
        total = rundir.read_if_any(run).get("total_timesteps", math.inf)
        complete = {s: v for s, v in evaluations(run).items() if len(v) >= episodes and s < total}
        by_run.append({step - step % every: sum(v) / len(v) for step, v in complete.items()})
    shared = set.intersection(*(set(means) for means in by_run)) if by_run else set()
    return {step: sum(means[step] for means in by_run) / len(by_run) for step in sorted(shared)}


def _finite(objective: float | None) -> bool:
    return objective is not None and math.isfinite(objective)
