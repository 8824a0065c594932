"""From what was typed to what Hydra runs: every mistake is answered here, in one line, before anything heavy
is imported."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl import launchers, machine, resume, rundir
from rl.config import check_spaces, register_schema
from rl.errors import ConfigError, DiskFullError, NonFiniteError
from rl.launchers.grid_sweeper import grid
from rl.launchers.local import fitting_pool
from rl.launchers.sweep import Sweep, is_sweep, key_of, own
from rl.schemas import flatten, nearest, plain, unknown_key

# Mappings whose keys are the user's: overrides may add to them without Hydra's plus sign.
OPEN = ("env.kwargs",)
# Keys whose value is the path of something that is there.
PATHS = ("resume", "warm_start")
# Launchers whose jobs run on this machine: with them, a run without -m runs here, in this process.
HERE = ("local", "basic")
_CHOICES = "hydra.runtime.choices."
CONF = Path(__file__).resolve().parent.parent / "conf"


def prepare(argv: list[str]) -> tuple[list[str], AbstractContextManager[Any]]:
    """Check a command line and choose where it writes.

    Args:
        argv: the arguments after the program's name.

    Returns:
        The arguments for Hydra: options first, then the overrides, with the run or sweep directory added.
        That directory has been made, exclusively, unless the command only shows something. And the context
        to hand them to Hydra in, which takes back what was written for a sweep that cannot begin.

    Raises:
        ConfigError: the command line is wrong; nothing was written.
    """
    register_schema()
    launchers.register()
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
    args = parse(argv)
    options = [word for word in argv if word not in args.overrides]
    args.overrides = opened(args.overrides)
    sweep = sweep_to_continue(args.overrides)
    if sweep is not None:
        given = [word for word in args.overrides if not word.startswith("resume=")]
        args.overrides, earlier = sweep.continued(given)
        options = [*earlier, *(word for word in options if word not in earlier)]
        args = parse([*options, *args.overrides])
    if (
        args.help
        or args.hydra_help
        or args.cfg
        or args.info
        or args.shell_completion
        or args.experimental_rerun
    ):
        return [*options, *args.overrides], nullcontext()
    with composer(args) as composed:
        parsed = OverridesParser.create().parse_overrides(args.overrides)
        sweeps = [str(override.input_line) for override in parsed if override.is_sweep_override()]
        steady = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
        cfg = composed(steady)
        here = str(cfg.hydra.runtime.choices["hydra/launcher"]) in HERE
        multirun = args.multirun or cfg.hydra.mode == RunMode.MULTIRUN or not here or sweep is not None
        if sweeps and not multirun:
            raise ConfigError(
                f"{sweeps[0]}: several values make a sweep, which needs -m: python launch.py -m "
                f"{' '.join(args.overrides)}"
            )
        if not multirun:
            return [*options, *args.overrides, *_prepare_run(cfg, args.overrides)], nullcontext()
        foreign = _check_plugins(cfg)
        with machine.elsewhere(allocation(cfg)) if not here else nullcontext():
            fitting = _check_jobs(cfg, args.overrides, composed)
        first = sweep.first_arguments if sweep is not None else args.overrides
        folder, made = (sweep.folder, []) if sweep is not None else _new_sweep(cfg, args.overrides)
    words = [*options, *args.overrides, *foreign, *fitting, *_for_sweep(folder, parsed, first)]
    return words, Sweep(folder).begun(args.overrides, options, made)


def parse(argv: list[str]) -> argparse.Namespace:
    """Hydra's own options and the overrides, in any order; ConfigError for anything else that starts with a
    dash."""
    parser = get_args_parser()
    args, unknown = parser.parse_known_intermixed_args(argv)
    for word in unknown:
        bare = word.lstrip("-")
        if "=" in bare:
            raise ConfigError(f"{word}: overrides take no dashes; write {bare}")
        options = [option for action in parser._actions for option in action.option_strings]
        raise ConfigError(f"{word}: no such option{nearest(word, options)}; --help lists groups and keys")
    return args


def opened(overrides: list[str]) -> list[str]:
    """The overrides as Hydra takes them: those of open mappings marked as additions, `env.kwargs.gravity=9`
    as `++env.kwargs.gravity=9`; and paths quoted where they have signs in them that mean something to Hydra,
    as a job's has: `resume=multirun/…/0003_algo=ppo,seed=3`."""
    words = []
    for word in overrides:
        key, _, value = word.partition("=")
        if word.startswith(tuple(f"{mapping}{end}" for mapping in OPEN for end in ".=")):
            word = f"++{word}"
        elif key in PATHS and set(value) & set("=,") and Path(value).expanduser().exists():
            word = f"{key}={quoted(value)}"
        words.append(word)
    return words


@contextmanager
def composer(args: argparse.Namespace) -> Iterator[Callable[[list[str]], DictConfig]]:
    """A function from overrides to the composed configuration, with Hydra's node, on the search path `args`
    ask for."""
    extra = []
    if args.config_dir is not None:
        folder = Path(args.config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {args.config_dir}: there is no such folder")
        extra = [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]
    root = Path(args.config_path).resolve() if args.config_path else CONF
    with initialize_config_dir(str(root), version_base="1.3", job_name="launch"):
        yield lambda overrides: compose(
            args.config_name or "config", [*overrides, *extra], return_hydra_config=True
        )


def _prepare_run(cfg: DictConfig, overrides: list[str]) -> list[str]:
    """Check one run and make its directory."""
    given = Path(cfg.hydra.run.dir).resolve() if _given("hydra.run.dir", overrides) else None
    plan = resume.plan(_job(cfg), overrides, given)
    replay = check_spaces(plan.config)
    if replay:
        print(f"replay buffer: {replay / 2**20:,.1f} MiB (algo.buffer_size={plan.config.algo.buffer_size:,})")
    if plan.checkpoint is not None and plan.directory is not None:
        return [f"hydra.run.dir={quoted(str(plan.directory))}", "hydra.output_subdir=null"]
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        return []
    run, recipe = plan.config.run, str(cfg.hydra.runtime.choices.algo)
    name = run.run_name or f"{recipe}_{plan.config.env.id}_s{run.seed}"
    return [f"hydra.run.dir={quoted(str(_dated(cfg.hydra.run.dir, name)))}"]


def sweep_to_continue(overrides: list[str]) -> Sweep | None:
    """The sweep that `resume=` names, where it names one."""
    named = [word.split("=", 1)[1].strip("'\"") for word in overrides if word.startswith("resume=")]
    folder = Path(named[-1]).expanduser().resolve() if named else None
    return Sweep(folder) if folder is not None and is_sweep(folder) else None


def _new_sweep(cfg: DictConfig, overrides: list[str]) -> tuple[Path, list[Path]]:
    """The folder of a new sweep, and those above it that are there for it alone, innermost first."""
    root = Path(cfg.hydra.sweep.dir).resolve()
    missing = [path for path in (root, *root.parents) if not path.exists()]
    if _given("hydra.sweep.dir", overrides):
        return root, missing[1:]
    folder = _dated(str(root), "sweep")
    return folder, [folder.parent, *missing]


def _check_jobs(
    cfg: DictConfig, overrides: list[str], composed: Callable[[list[str]], DictConfig]
) -> list[str]:
    """Check the jobs of a sweep, as many as it takes for every swept value to be seen once; an override where
    this machine's memory holds fewer of them at a time than would run."""
    seen: set[str] = set()
    largest = 0
    jobs = _jobs(cfg, overrides)
    for job in jobs:
        if not set(job) <= seen:
            seen.update(job)
            plan = resume.plan(_job(composed(job)), job, None)
            replay = check_spaces(plan.config)
            if getattr(plan.config.algo, "memory_map", None) is None:
                largest = max(largest, replay)
    if largest == 0 or cfg.hydra.runtime.choices["hydra/launcher"] != "local":
        return []
    return fitting_pool(cfg, len(jobs) if _is_grid(cfg) else None, largest)


def _check_plugins(cfg: DictConfig) -> list[str]:
    """Overrides that take out what a template sets for another launcher than the chosen one. Raises
    ConfigError where the launcher or sweeper is one of ours and has no such key."""
    foreign: list[str] = []
    for kind in ("launcher", "sweeper"):
        node = cfg.hydra[kind]
        plugin = Plugins.instance().class_name_to_class.get(str(node._target_))
        if plugin is None or not str(node._target_).startswith(launchers.PREFIX):
            continue
        known = list(inspect.signature(plugin).parameters)
        for key in map(str, node):
            if key in ("_target_", *known):
                continue
            name = cfg.hydra.runtime.choices[f"hydra/{kind}"]
            if kind == "launcher" and _owners(kind, key):
                foreign.append(f"~hydra.{kind}.{key}")
            else:
                raise ConfigError(
                    f"hydra.{kind}.{key}: hydra/{kind}={name} has no such key{nearest(key, known)}; "
                    f"it has {', '.join(known)}"
                )
    return foreign


def _for_sweep(folder: Path, parsed: list[Override], first: list[str]) -> list[str]:
    """What Hydra has to know of a sweep: its folder, and that what all jobs share stays out of their folders'
    names. In a sweep that began with the overrides `first`, what a later command set to another value is not
    shared by all, unless a resumed run may change it."""
    swept = {o.key_or_group for o in parsed if o.is_sweep_override()}
    later = own([str(o.input_line) for o in parsed if str(o.input_line) not in first])
    added = {key_of(word) for word in later if key_of(word).split(".")[0] not in resume.MUTABLE}
    steady = sorted({str(o.key_or_group) for o in parsed} - swept - added)
    return [
        "hydra.mode=MULTIRUN",
        f"hydra.sweep.dir={quoted(str(folder))}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quoted, steady))}]",
    ]


def allocation(cfg: DictConfig) -> machine.Allocation:
    """What the launcher asks of the machine that its jobs will run on."""
    gigabytes = cfg.hydra.launcher.get("mem_gb")
    return machine.Allocation(int(float(gigabytes) * 2**30) if gigabytes else None)


def _jobs(cfg: DictConfig, overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a grid; another sweeper draws its values as it goes, so its base is
    checked."""
    if not _is_grid(cfg):
        parsed = OverridesParser.create().parse_overrides(overrides)
        return [[str(o.input_line) for o in parsed if not o.is_sweep_override()]]
    return grid(cfg.hydra.sweeper.params or {}, overrides)


def _is_grid(cfg: DictConfig) -> bool:
    return str(cfg.hydra.sweeper._target_).endswith(("BasicSweeper", "GridSweeper"))


def _job(cfg: DictConfig) -> DictConfig:
    """The configuration without Hydra's own node, as the job sees it."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _given(key: str, overrides: list[str]) -> bool:
    return any(override.lstrip("+").startswith(f"{key}=") for override in overrides)


def _dated(parent: str, name: str) -> Path:
    """A new directory `<parent>/<day>/<time>_<name>_<4 hex>`."""
    now = datetime.now()
    return rundir.create(Path(parent).resolve() / f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}_{safe(name)}")


def safe(name: str) -> str:
    """`name` as one path component: everything but letters, digits and `._=,+-` becomes a dash."""
    return re.sub(r"[^\w.=,+-]+", "-", name)[:120]


def job_folder(number: Any, overrides: Any) -> str:
    """The folder of a sweep's job, `0003_algo=ppo,seed=3`; a long one is cut and ends in a hash of the
    whole."""
    name = safe(str(overrides))
    if len(name) > 80:
        name = f"{name[:70]}-{hashlib.sha256(str(overrides).encode()).hexdigest()[:8]}"
    index = f"{number:04d}" if isinstance(number, int) else str(number)
    return f"{index}_{name}" if name else index


def quoted(text: str) -> str:
    """`text` as a quoted value of Hydra's override grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@contextmanager
def plain_errors(argv: list[str]) -> Iterator[None]:
    """Print the errors that are not the program's as one line: exit code 2 for a wrong configuration, 1 for
    numbers gone bad.

    Ctrl-C leaves with 130, as shells expect; everything else passes with its traceback.
    """
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        line, code = message(error, argv), 2
    except (NonFiniteError, DiskFullError) as error:
        line, code = str(error), 1
    except KeyboardInterrupt:
        line, code = "interrupted", 130
    else:
        return
    print(line, file=sys.stderr)
    raise SystemExit(code)


def message(error: Exception, argv: list[str]) -> str:
    """One plain line for an error of ours, of Hydra's or of OmegaConf's."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
    ours = next((cause for cause in causes if isinstance(cause, ConfigError)), None)
    if ours is not None:  # also where Hydra has wrapped it
        return str(ours)
    chain = "\n".join(str(cause) for cause in causes)
    first = " ".join(str(error).split("\n")[0].split())
    group = re.search(r"Could not find '([^']*)/([^'/]*)'", chain)
    if isinstance(error, MissingConfigException) and group:
        listed = chain.split("Config search path:")[0]
        options = re.findall(r"^\t(.+)$", listed, flags=re.MULTILINE)
        known = (
            f"choose one of {', '.join(options)}{nearest(group[2], options)}" if options else "no such group"
        )
        keys = [word.partition("=")[0] for word in argv if word.endswith(f"={group[2]}")]
        nested = next((key for key in keys if key.startswith(f"{group[1]}@")), group[1])
        return f"{nested}={group[2]}: {known}"
    if isinstance(error, OverrideParseException):
        reason = " ".join(str(error.__cause__ or error).split("\n")[0].split())
        return (
            f"{error.override}: not an override ({reason}); write key=value, quoted where the value "
            f"has spaces or brackets"
        )
    known_keys = _known_keys(argv)
    missing = re.search(r"Could not override '([^']*)'", chain)
    if missing:
        key = missing[1].lstrip("+")
        if "@" in key:
            return f"unknown key {key}; " + _nested_options(key, known_keys)
        if key in ("multirun", "sweep_dir"):
            return f"unknown key {key}; a sweep is continued with resume=<its folder>"
        return _of_another_plugin(key) or unknown_key(key, known_keys)
    typed = next((cause for cause in causes if isinstance(cause, OmegaConfBaseException)), None)
    if isinstance(error, ConfigCompositionException | OmegaConfBaseException) and typed is not None:
        return plain(typed, known=known_keys)
    return first


def _of_another_plugin(key: str) -> str | None:
    """One line for a key of a launcher or sweeper that was not chosen; None for other keys."""
    named = re.match(r"hydra\.(launcher|sweeper)\.([^.]+)", key)
    owners = _owners(*named.groups()) if named else []
    if named is None or not owners:
        return None
    owner = f"hydra/{named[1]}={owners[0]}"
    return f"{key}: a key of {owner}, which is not chosen; add {owner}"


def _owners(kind: str, key: str) -> list[str]:
    """Our launchers or sweepers that have this key."""
    files = sorted((CONF / "hydra" / kind).glob("*.yaml"))
    return [file.stem for file in files if key in OmegaConf.load(file)]


def _nested_options(key: str, known: Mapping[str, Any]) -> str:
    """Advice for a key group@place: the places where the chosen options have options of their own."""
    nested = [k for k in known if "@" in k]
    if not nested:
        return "no chosen option has another within; network=lstm has network@network.encoder"
    (near,) = difflib.get_close_matches(key, nested, n=1, cutoff=0)
    return f"did you mean {near} (e.g. {near}={known[near]})?"


def _known_keys(argv: list[str]) -> dict[str, Any]:
    """Every dotted key, and every group, of the configuration that the group choices of `argv` lead to, else
    of the default one."""
    args, _ = get_args_parser().parse_known_intermixed_args(argv)
    groups = [
        o
        for o in args.overrides
        if re.fullmatch(r"[\w/]+=[\w,\[\]]+", o) and (CONF / o.split("=")[0]).is_dir()
    ]
    for choices in (groups, []):
        try:
            with composer(args) as composed:
                cfg = composed(choices)
        except (ConfigError, HydraException, OmegaConfBaseException):
            continue  # the group choices themselves are wrong: the default configuration has to do
        container = OmegaConf.to_container(cfg, resolve=False)
        assert isinstance(container, dict)
        keys = {k.removeprefix(_CHOICES): v for k, v in flatten(container) if not isinstance(v, dict)}
        return {k: v for k, v in keys.items() if not k.startswith("hydra.runtime.")}
    return {}
