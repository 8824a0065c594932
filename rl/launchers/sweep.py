"""A sweep's folder: what was asked for, the jobs, each frozen in a folder of its own, and their ledger.

multirun/2026-12-02/15-04-05_sweep_3f2a/
  sweep.json        arguments, command, code
  ledger.jsonl      what happened to each job (rl/launchers/ledger.py)
  code_1a2b3c4d.diff   what the working tree had beyond its commit when jobs were frozen
  0003_seed=3/      a run directory, and in it
    job.yaml        the composed configuration with Hydra's node: what runs, whatever becomes of conf/
    output.txt      what the job's processes printed
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from rl import provenance, resume, rundir
from rl.config import check
from rl.errors import ConfigError
from rl.launchers.ledger import Job, Ledger

if TYPE_CHECKING:
    from rl.launchers.slurm import InLine

IDENTITY_FREE = ("hydra", "resume", "fail_fast", "retry_failed")
"""Keys that say how to run a job, not what it is: not in its hash."""


class Sweep:
    """A sweep folder, opened to read it, to add jobs, and to note what happens to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder)

    # --- what was asked for ----------------------------------------------------------------------

    @property
    def record(self) -> dict[str, Any]:
        """sweep.json: `arguments` and `options` as typed, `command`, `created`, `git`."""
        record: dict[str, Any] = json.loads((self.folder / "sweep.json").read_text())
        return record

    def write(self, arguments: Sequence[str], options: Sequence[str]) -> None:
        """Note what was asked for; what the folder's earlier commands asked for stays under `earlier`."""
        facts = provenance.collect()
        record = {
            "arguments": list(arguments),
            "options": list(options),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": facts["command"],
            "working_directory": facts["working_directory"],
            "git": facts["git"],
            "earlier": [],
        }
        if is_sweep(self.folder):
            before = self.record
            record["earlier"] = [*before.pop("earlier"), before]
        rundir.replace_text(self.folder / "sweep.json", json.dumps(record, indent=2) + "\n")

    @contextmanager
    def begun(
        self, arguments: Sequence[str], options: Sequence[str], made: Sequence[Path] = ()
    ) -> Iterator[None]:
        """A block that begins what was asked for. Where it ends in an error before anything has happened to a
        job, the folder is as it was before.

        Args:
            arguments, options: as for `write`.
            made: folders above a new one that were not there before, innermost first.
        """
        new = not self.folder.exists() or not any(self.folder.iterdir())
        sweep_file, events = self.folder / "sweep.json", self.ledger.size
        before = sweep_file.read_text() if sweep_file.exists() else None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write(arguments, options)
        try:
            yield
        except BaseException:
            if self.ledger.size == events:
                if new:
                    shutil.rmtree(self.folder)
                elif before is not None:
                    rundir.replace_text(sweep_file, before)
                else:
                    sweep_file.unlink()
                for path in made:
                    with suppress(OSError):  # another command has put something there
                        path.rmdir()
            raise

    def continued(self, given: Sequence[str]) -> tuple[list[str], list[str]]:
        """Overrides and options of the command that goes on with this sweep: those of its last command, with
        `given` in place of what they name. Another launcher or sweeper takes none of the former's
        settings, and `retry_failed` is asked for each time anew."""
        record = self.record
        new = {"retry_failed", *(key_of(word) for word in given)}
        replaced = tuple(f"hydra.{kind}." for kind in ("launcher", "sweeper") if f"hydra/{kind}" in new)
        kept = [
            word
            for word in record["arguments"]
            if word not in given and not (key_of(word) in new or key_of(word).startswith(replaced))
        ]
        return [*kept, *given], record["options"]

    @property
    def first_arguments(self) -> list[str]:
        """The overrides of the command that began the sweep."""
        record = self.record
        first: list[str] = [*record["earlier"], record][0]["arguments"]
        return first

    @contextmanager
    def led(self) -> Iterator[None]:
        """A block in which this process chooses the sweep's jobs as it goes, until `rl cancel` stops it."""
        file = self.folder / "leader.json"
        rundir.replace_text(file, json.dumps(rundir.process_identity()) + "\n")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def leader(self) -> dict[str, Any]:
        """The identity of the process that chooses the jobs, which may be dead; empty where none does."""
        try:
            identity: dict[str, Any] = json.loads((self.folder / "leader.json").read_text())
        except FileNotFoundError:
            return {}
        return identity

    # --- jobs -------------------------------------------------------------------------------------

    def jobs(self) -> dict[int, Job]:
        """How each job stands, by number."""
        return self.ledger.jobs()

    def settle(self) -> dict[str, InLine] | None:
        """Note what became of jobs that could not do so themselves: killed is what the ledger has as running
        and no process of this machine runs any more; for the jobs of a cluster, it is asked.

        Returns:
            What Slurm has in line or runs, by its names; empty where it need not be asked, None where it does
            not answer.
        """
        from rl.launchers import slurm

        jobs = self.jobs().values()
        for job in jobs:
            if job.state == "running" and job.slurm_job is None and rundir.process_exists(vars(job)) is False:
                self.ledger.append(job.number, "killed", only_if=job, error="its process is gone")
        asked = any(job.slurm_job and job.state != "completed" for job in jobs)
        return slurm.settle(self) if asked else {}

    def changed_code(self) -> str | None:
        """A line where jobs were frozen with other code, or another conf/, than there is now; None where none
        was."""
        frozen = [job for job in self.jobs().values() if job.code]
        old = [job for job in frozen if job.code != self._version[0]]
        if not old:
            return None
        left = any(job.state != "completed" for job in old)
        what = (
            "; those that are left train what they were frozen with, in the code as it is now" if left else ""
        )
        return (
            f"warning: the working tree is not what it was when {len(old)} of the jobs were frozen (commit "
            f"{str(old[0].code.get('commit'))[:12]}){what}; jobs that are new get what conf/ has now"
        )

    def find(self, overrides: Sequence[str], hashed: str | None = None) -> Job | None:
        """The job with these overrides in any order, or else with this configuration; None where there is
        none."""
        jobs = list(self.jobs().values())
        for job in jobs:
            if sorted(job.overrides) == sorted(own(overrides)):
                return job
        return next((job for job in jobs if hashed is not None and job.config_hash == hashed), None)

    def freeze(self, cfg: DictConfig, overrides: Sequence[str], shared: Collection[str] = ()) -> Job:
        """The job that `cfg` describes: the one that is there already, or a new one in a folder of its own.

        One that differs only in keys that a resumed run may change, none of which is swept, is there already
        too: it is frozen anew, unless it is complete and has no more steps to train, or has failed and is not
        to be retried.

        Args:
            cfg: the composed configuration with Hydra's node; its `hydra.job.num` is set here.
            overrides: the job's share of the command line.
            shared: the keys that the command sets to the same value for all jobs.

        Raises:
            ConfigError: the configuration is wrong, or its job runs with another; nothing was written.
        """
        task = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        resolved = check(task).resolved
        hashed, identity = config_hash(resolved), config_hash(resolved, resume.MUTABLE)
        known = self.find(overrides, hashed)
        if known is not None:
            return known
        earlier = self._changeable(overrides, identity, shared)
        if earlier is not None and earlier.state == "failed" and not task.retry_failed:
            return earlier
        if earlier is not None and earlier.state == "completed":
            trained = OmegaConf.load(earlier.path / "job.yaml").total_timesteps
            if resolved["total_timesteps"] <= trained:
                return earlier
        if earlier is not None and earlier.state in ("submitted", "running"):
            raise ConfigError(
                f"resume={self.folder}: job {earlier.number} is {earlier.state} with another "
                f"configuration; rl cancel {self.folder} {earlier.number} first, or wait until it has ended"
            )
        number = self._next_number() if earlier is None else earlier.number
        with open_dict(cfg):
            cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
            cfg.hydra.sweep.dir = str(self.folder)
            cfg.hydra.sweep.subdir = str(cfg.hydra.sweep.subdir) if earlier is None else earlier.folder
        folder = str(cfg.hydra.sweep.subdir)
        if earlier is None:
            (self.folder / folder).mkdir(parents=True, exist_ok=False)
        frozen = {**OmegaConf.to_container(task, resolve=True), "hydra": OmegaConf.to_container(cfg.hydra)}  # type: ignore[dict-item]
        rundir.replace_text(self.folder / folder / "job.yaml", OmegaConf.to_yaml(OmegaConf.create(frozen)))
        self.ledger.append(
            number,
            "pending",
            folder=folder,
            overrides=own(overrides),
            config_hash=hashed,
            identity=identity,
            code=self._keep_code(),
        )
        return self.jobs()[number]

    def _changeable(self, overrides: Sequence[str], identity: str, shared: Collection[str]) -> Job | None:
        """The one job that trains the same but for keys that a resumed run may change; None where such a key
        is swept, and so tells jobs apart."""
        swept = {key_of(word).split(".")[0] for word in own(overrides) if key_of(word) not in shared}
        found = [job for job in self.jobs().values() if job.identity == identity]
        return found[0] if len(found) == 1 and not swept & set(resume.MUTABLE) else None

    def _next_number(self) -> int:
        """One beyond every number that a job or a folder here has: none is used twice."""
        folders = [path.name.split("_")[0] for path in self.folder.iterdir() if path.is_dir()]
        return max([-1, *self.jobs(), *(int(name) for name in folders if name.isdigit())]) + 1

    @cached_property
    def _version(self) -> tuple[dict[str, Any], str]:
        """`code_version` as this command found it."""
        return code_version()

    def _keep_code(self) -> dict[str, Any]:
        """The commit and the hash of the changes beyond it, which are kept in a file once."""
        code, changes = self._version
        path = self.folder / f"code_{str(code['diff'])[:8]}.diff"
        if changes and not path.exists():
            rundir.replace_text(path, changes)
        return code


def is_sweep(folder: Path) -> bool:
    """Whether `folder` is a sweep's."""
    return (folder / "sweep.json").is_file()


def open_sweep(path: str | Path, key: str = "SWEEP") -> Sweep:
    """The sweep whose folder is at `path`. Raises ConfigError, naming `key`, where there is none."""
    folder = Path(path).expanduser().resolve()
    if not is_sweep(folder):
        what = "there is no such folder" if not folder.is_dir() else "it has no sweep.json"
        raise ConfigError(f"{key}={path}: {what}; sweeps are below multirun/<day>/")
    return Sweep(folder)


def own(overrides: Sequence[str]) -> list[str]:
    """The overrides without those that say how a job runs, not what it is."""
    return [word for word in overrides if key_of(word).split(".")[0].split("/")[0] not in IDENTITY_FREE]


def key_of(override: str) -> str:
    """What an override sets: `algo.gamma` of `++algo.gamma=0.9`."""
    return str(OverridesParser.create().parse_override(override).key_or_group)


def config_hash(resolved: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """Sixteen hex digits that two jobs share where they train the same, the keys `without` aside."""
    what = {key: value for key, value in resolved.items() if key not in (*IDENTITY_FREE, *without)}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def code_version() -> tuple[dict[str, Any], str]:
    """`{"commit": …, "diff": sha256 of the changes, None where there are none}`, and the changes."""
    git, changes = provenance.git_state(), provenance.diff()
    digest = hashlib.sha256(changes.encode("utf-8", "surrogateescape")).hexdigest() if changes else None
    return {"commit": git["commit"], "diff": digest}, changes
