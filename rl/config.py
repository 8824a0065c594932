"""The configuration of a run: its schema, and the checks across keys, before anything heavy is imported.

The values live in `conf/`, the types in dataclasses: here for the keys that belong to no group, beside what
they configure for the others (see rl/schemas.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.errors import ConfigError
from rl.machine import cuda_devices
from rl.schemas import accept_whole_floats, bounded, join, nearest, plain, schema_of, typed


@dataclass
class CheckpointConfig:
    """The keys of `checkpoint`."""

    every: int = bounded(ge=1)
    keep: int = bounded(ge=0)
    replay: bool = MISSING


@dataclass
class EvalConfig:
    """The keys of `eval`."""

    every: int = bounded(ge=0)
    episodes: int = bounded(ge=1)
    deterministic: bool = MISSING


@dataclass
class RunConfig:
    """The keys of a run that belong to no group; what they mean stands beside their values in
    conf/config.yaml."""

    seed: int = bounded(ge=0)
    total_timesteps: int = bounded(ge=1)
    device: str = MISSING
    precision: str = bounded(choices=("fp32", "bf16"))
    compile: bool = MISSING
    torch_threads: int | None = bounded(ge=1)
    deterministic: bool = MISSING
    run_name: str | None = MISSING
    tags: list[str] = MISSING
    capture_video: bool = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    resume: str = MISSING
    warm_start: str | None = MISSING
    env: Any = MISSING
    network: Any = MISSING
    algo: Any = MISSING
    logger: Any = MISSING
    fail_fast: bool = False
    retry_failed: bool = False


@dataclass
class Config:
    """A whole configuration after its checks: typed objects for hot code, and the plain mapping that is kept
    on disk."""

    run: RunConfig
    env: Any  # an env factory, e.g. rl.envs.gymnasium_envs.GymnasiumEnvs
    network: Any  # a network description, e.g. rl.networks.mlp.MLP
    algo: Any  # the algorithm's config dataclass; its class is named by algo_target
    algo_target: str
    loggers: dict[str, Any]
    resolved: dict[str, Any]


def register_schema() -> None:
    """Make the run-level schema known to Hydra as `schema` and let whole floats such as 1e6 stand for
    integers."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    accept_whole_floats()


def instantiate(section: Mapping[str, Any], at: str) -> Any:
    """The object that a mapping with a `_target_` describes, its keys typed and checked first.

    An algorithm is answered with its config dataclass: what it runs on is only known once the run starts.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("_target_"), str):
        raise ConfigError(
            f"{at}: choose an option of the group, e.g. {at}={'ppo' if at == 'algo' else '<name>'}; it "
            f"needs a _target_"
        )
    import hydra.utils

    schema = schema_of(section["_target_"])
    values = typed(schema, {k: v for k, v in section.items() if k != "_target_"}, at)
    for key, value in values.items():
        if isinstance(value, Mapping) and "_target_" in value:  # e.g. the encoder under a recurrent network
            values[key] = instantiate(value, join(at, key))
    if schema.__name__ != section["_target_"].rpartition(".")[2]:
        return schema(**values)
    return hydra.utils.get_class(section["_target_"])(**values)


def algorithm_class(target: str) -> Any:
    """The algorithm class itself: this is where torch gets imported."""
    import hydra.utils

    return hydra.utils.get_class(target)


def check(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Type every key and check what can be checked without making an env.

    Raises:
        ConfigError: with one line naming the key, its value and what is allowed.
    """
    try:
        if isinstance(cfg, DictConfig):
            cfg = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(plain(error)) from error
    values = {str(k): v for k, v in cfg.items()}
    run = RunConfig(**typed(RunConfig, values, ""))
    env = instantiate(values["env"], "env")
    loggers = {
        name: instantiate(section, f"logger.{name}") for name, section in (values.get("logger") or {}).items()
    }
    config = Config(
        run=run,
        env=env,
        network=instantiate(values["network"], "network"),
        algo=instantiate(values["algo"], "algo"),
        algo_target=values["algo"]["_target_"],
        loggers=loggers,
        resolved=values,
    )
    config.resolved = resolved(config)
    for logger in loggers.values():
        logger.check()
    check_device(run.device)
    config.algo.check(run, env)
    return config


def resolved(config: Config) -> dict[str, Any]:
    """The plain mapping of a checked configuration: every value as the code sees it (1e6 an integer)."""
    as_dict = {f.name: getattr(config.run, f.name) for f in fields(RunConfig)}
    as_dict = OmegaConf.to_container(OmegaConf.create(as_dict, flags={"allow_objects": True}), resolve=True)  # type: ignore[assignment]
    for name in ("checkpoint", "eval"):
        as_dict[name] = dict(vars(getattr(config.run, name)))
    sections = {"env": config.env, "network": config.network, "algo": config.algo}
    for name, section in sections.items():
        as_dict[name] = _with_target(config.resolved[name], section)
    as_dict["logger"] = {
        name: _with_target(config.resolved["logger"][name], logger) for name, logger in config.loggers.items()
    }
    return as_dict


def _with_target(given: Mapping[str, Any], section: Any) -> dict[str, Any]:
    """The fields of `section` as a plain mapping, each with the `_target_` that was given."""
    values = {f.name: getattr(section, f.name) for f in fields(section) if f.init}
    nested = {key: _with_target(given[key], value) for key, value in values.items() if is_dataclass(value)}
    return {"_target_": given["_target_"], **values, **nested}


def check_spaces(config: Config) -> int:
    """Make one env, and check that algorithm and network can work with its spaces (and that it renders, for a
    video).

    Returns:
        The bytes that a replay buffer will take, 0 where there is none.

    Raises:
        ConfigError: naming `env.id`, `algo` or `network` and what fits.
    """
    observation_space, action_space = config.env.check(render=config.run.capture_video)
    if config.run.capture_video:
        from rl import video

        video.check()
    supported = config.algo.action_spaces
    kind = type(action_space).__name__
    if kind not in supported:
        name = config.algo_target.rpartition(".")[2]
        raise ConfigError(
            f"algo: {name} acts in {' and '.join(supported)} action spaces, but env.id={config.env.id} "
            f"has {action_space}"
        )
    _check_memory(config)
    config.network.check(observation_space)
    replay: int = config.algo.check_spaces(config.env, observation_space, action_space)
    return replay


def _check_memory(config: Config) -> None:
    """Raise ConfigError where one of network and algorithm carries a recurrent state and the other does
    not."""
    remembers, carries = (getattr(part, "recurrent", False) for part in (config.network, config.algo))
    name = config.algo_target.rpartition(".")[2]
    if remembers and not carries:
        raise ConfigError(
            f"network: it has a memory, which {name} does not carry; algo=ppo_atari_lstm does, and "
            "network=mlp and network=nature_cnn have none"
        )
    if carries and not remembers:
        raise ConfigError(
            f"network: it has no memory, which {name} is for; network=lstm has, around any other "
            "(network@network.encoder=mlp)"
        )


def check_device(device: str) -> None:
    """Raise ConfigError when `device` is malformed or this machine does not have it."""
    kind, _, index = device.partition(":")
    if device not in ("auto", "cpu", "cuda") and not (kind == "cuda" and index.isdigit()):
        raise ConfigError(
            f"device={device}: choose auto, cpu, cuda or cuda:N{nearest(device, ('auto', 'cpu', 'cuda'))}"
        )
    if kind == "cuda":
        count = cuda_devices()
        if count is None:  # the job will run elsewhere
            return
        if count == 0:
            raise ConfigError(f"device={device}: no CUDA device here; device=cpu or device=auto works")
        if index and int(index) >= count:
            raise ConfigError(
                f"device={device}: this machine has {count} CUDA device(s), the last is cuda:{count - 1}"
            )
