"""Games of several agents (PettingZoo's Parallel API) as one `VectorEnv`: each agent of each game is a row.

Rows are ordered by game, then as in the game's `possible_agents`. A row whose agent dies before its game ends
is dead until then: its observation is zero, its action is ignored, and `Step.active` is False. A game is over
when none of its agents lives, and starts anew within the same step.

Every game is begun with an explicit seed, so that its number and the actions since are all it takes to bring
it back: as in `rl.envs.sync`, they are replayed and the outcome is compared with what was saved.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rl.envs.agent_views import GameOptions, Images, ParallelEnv, RowSpaces, Vectors, is_image, row_spaces
from rl.envs.spaces import action_adapter
from rl.envs.sync import REMEMBERED_STEPS
from rl.envs.vector import Episode, Restored, Step
from rl.errors import ConfigError, NonFiniteError
from rl.seeding import MAX_SEED, sequence_of, sequence_state

log = logging.getLogger(__name__)

Maker: TypeAlias = Callable[[], ParallelEnv]


def fitting_num_envs(num_envs: int, agents: int) -> int:
    """The multiple of `agents`, at least one, that is nearest to `num_envs`; the larger of two."""
    return max(1, (2 * num_envs + agents) // (2 * agents)) * agents


class ParallelEnvs:
    """A `VectorEnv` whose N rows are the agents of N / agents games, stepped one after the other.

    `reset` seeds game `g` from child `g` of the seed, and the k-th start of that game from child `(g, k)`.
    `episodes` name rows; each agent's episode ends at its own death, with its own return. While a row is
    dead, `terminated` is set and its reward is 0.
    """

    def __init__(
        self,
        make: Maker,
        num_envs: int,
        options: GameOptions,
        *,
        name: str,
        round_up: bool = False,
        remembered_steps: int = REMEMBERED_STEPS,
    ) -> None:
        """Make the games of `num_envs` rows in all; `name` is what messages call them.

        With `round_up`, rows are added until the last game is whole. Games longer than `remembered_steps`
        are not saved. Raises ConfigError where the rows are no whole number of games or the spaces are not
        allowed, and what `make` raises.
        """
        self._games: list[_Game] = []
        self._closed = False
        env = make()
        try:
            spaces_ = row_spaces(env, options, name)
            self._agents = len(env.possible_agents)
            if num_envs % self._agents and not round_up:
                raise ConfigError(
                    f"env.num_envs={num_envs} counts agents, and {name} has {self._agents} a game; "
                    f"env.num_envs={fitting_num_envs(num_envs, self._agents)} is a whole number of games"
                )
            self._games = [_Game(env, options, spaces_)]
            while self._agents * len(self._games) < num_envs:
                self._games.append(_Game(make(), options, spaces_))
        except BaseException:
            if not self._games:
                env.close()
            self.close()
            raise
        self.num_envs = self._agents * len(self._games)
        self.observation_space, self.action_space = spaces_
        skipped = options.frame_skip if self._games[0].has_images else 1
        self.render_fps = float(env.metadata.get("render_fps") or 30) / skipped
        self._name = name
        self._clip_rewards = options.clip_rewards
        self._shape = (self.num_envs, *self.observation_space.shape)
        self._dtype = self.observation_space.dtype
        self._actions = action_adapter(env.action_space(env.possible_agents[0]), self.num_envs)
        self._rows = [slice(i, i + self._agents) for i in range(0, self.num_envs, self._agents)]
        self._seed: np.random.SeedSequence | None = None
        self._remembered_steps = remembered_steps

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        self._seed = seed
        obs = np.zeros(self._shape, self._dtype)
        for g, (game, rows) in enumerate(zip(self._games, self._rows, strict=True)):
            game.begin(seed, (g, 0))
            game.observe(obs[rows])
        self._require_finite(obs)
        return obs

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        given = self._actions.for_envs(actions)
        next_obs = np.zeros(self._shape, self._dtype)
        obs = next_obs
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        active = np.ones(self.num_envs, np.bool_)
        episodes: list[Episode] = []
        changed: list[tuple[int, _Game, slice]] = []  # games in which an episode ended
        for g, (game, rows) in enumerate(zip(self._games, self._rows, strict=True)):
            if len(game.history) <= self._remembered_steps:
                game.history.append(self._actions.kept(given[rows]))
            active[rows] = game.alive
            reward[rows], terminated[rows], truncated[rows] = game.step(given[rows])
            game.observe(next_obs[rows], was_alive=active[rows])
            if not np.array_equal(active[rows], game.alive):
                changed.append((g, game, rows))
        self._require_finite(next_obs)
        if changed:
            obs = next_obs.copy()
        for g, game, rows in changed:
            for j in range(self._agents):
                if active[rows.start + j] and not game.alive[j]:
                    episodes.append(Episode(rows.start + j, game.returns[j], game.steps))
            if not any(game.alive):
                assert self._seed is not None
                game.begin(self._seed, (g, game.number + 1))
            obs[rows] = 0
            game.observe(obs[rows])
        if changed:
            self._require_finite(obs)
        if self._clip_rewards:
            np.sign(reward, out=reward)
        return Step(obs, reward, terminated, truncated, next_obs, episodes, None if active.all() else active)

    def render(self, index: int) -> np.ndarray:
        """Return the frame of the game in which row `index` plays, uint8 `[H, W, 3]`."""
        frame = self._games[index // self._agents].env.render()
        if not isinstance(frame, np.ndarray):
            raise RuntimeError(f"row {index} was not made with render_mode='rgb_array', so it has no frame")
        return frame

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`. Nothing in it is shared with these environments."""
        if self._seed is None:
            raise RuntimeError("environments that were never reset have no state to save")
        return {
            "seed": sequence_state(self._seed),
            "games": [self._game_state(game) for game in self._games],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`.

        The rows of a game are exact when replaying it gives the saved observations, returns, deaths and
        random state, bit for bit. Another game is given up, and the one that would have followed it begins.
        """
        records = state["games"]
        if len(records) != len(self._games):
            raise ValueError(f"the saved state is of {len(records) * self._agents} rows, not {self.num_envs}")
        seed = self._seed = sequence_of(state["seed"])
        obs = np.zeros(self._shape, self._dtype)
        exact = np.zeros(self.num_envs, np.bool_)
        for g, (game, rows, record) in enumerate(zip(self._games, self._rows, records, strict=True)):
            exact[rows] = self._replay(g, game, record)
            if not exact[rows.start]:
                game.begin(seed, (g, int(record["number"]) + 1))
            game.observe(obs[rows])
        self._require_finite(obs)
        return Restored(obs, exact)

    def close(self) -> None:
        """Close every game; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for game in self._games:
            game.env.close()

    def _game_state(self, game: _Game) -> dict[str, Any]:
        """What `_replay` needs for `game`; no actions where it is too long to remember."""
        actions = None
        if len(game.history) == game.steps:
            shape = (game.steps, self._agents, *self._actions.shape)
            actions = np.array(game.history, self._actions.dtype).reshape(shape)
        return {
            "number": game.number,
            "actions": actions,
            "obs": self._observed(game),
            "returns": list(game.returns),
            "alive": list(game.alive),
            "random_state": _random_state(game.env),
        }

    def _replay(self, g: int, game: _Game, record: Mapping[str, Any]) -> bool:
        """Play the saved game `g` again; tell whether it came out the same, bit for bit."""
        assert self._seed is not None
        if record["actions"] is None:
            return False
        try:
            game.begin(self._seed, (g, int(record["number"])))
            for given in self._actions.replayed(record["actions"]):
                game.history.append(self._actions.kept(given))
                game.step(given)
                if not any(game.alive):
                    return False
        except Exception as error:  # whatever an environment raises here, a new game is the way out
            log.debug("replaying game %d failed", g, exc_info=error)
            return False
        return bool(
            self._observed(game).tobytes() == np.asarray(record["obs"], self._dtype).tobytes()
            and game.returns == list(record["returns"])
            and game.alive == list(record["alive"])
            and _random_state(game.env) == record["random_state"]
        )

    def _observed(self, game: _Game) -> np.ndarray:
        rows = np.zeros((self._agents, *self._shape[1:]), self._dtype)
        game.observe(rows)
        return rows

    def _require_finite(self, obs: np.ndarray) -> None:
        """Raise NonFiniteError about the first row whose observation or return is not finite."""
        returns = np.array([value for game in self._games for value in game.returns])
        for what, array in (("reward", returns), ("observation", obs)):
            if array.dtype == np.uint8 or np.isfinite(array).all():
                continue
            row, *at = np.argwhere(~np.isfinite(array))[0].tolist()
            value = array[(row, *at)]
            place = f" at {at}" if at else ""
            raise NonFiniteError(f"the {what} of environment {row} ({self._name}) is {value}{place}")


class _Game:
    """One parallel environment, its agents in fixed order, and what each has seen of it."""

    def __init__(self, env: ParallelEnv, options: GameOptions, spaces_: RowSpaces) -> None:
        self.env = env
        self.agents = list(env.possible_agents)
        space = env.observation_space(self.agents[0])
        self.has_images = is_image(space)
        self._view: Images | Vectors
        if self.has_images:
            self._view = Images(len(self.agents), options)
        else:
            self._view = Vectors(space, len(self.agents), spaces_.observation, options)
        self._skip = options.frame_skip if self.has_images else 1
        self._noop_max = options.noop_max
        self._limit = options.max_episode_steps
        self.number = 0  # how many games were begun before this one
        self.steps = 0
        self.alive = [False] * len(self.agents)
        self.returns = [0.0] * len(self.agents)
        self.history: list[Any] = []  # actions of all agents since the game began

    def begin(self, seed: np.random.SeedSequence, key: tuple[int, int]) -> None:
        """Begin game number `key[1]`, seeded from descendant `key` of `seed`."""
        child = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *key))
        number, draw = child.generate_state(2, np.uint64).tolist()
        observations, _ = self.env.reset(seed=number & MAX_SEED)
        for _ in range(1 + draw % self._noop_max if self._noop_max else 0):
            following, _, terminations, truncations, _ = self.env.step(dict.fromkeys(self.env.agents, 0))
            if any(terminations.values()) or any(truncations.values()):
                observations, _ = self.env.reset(seed=number & MAX_SEED)
                break
            observations = following
        self.number = key[1]
        self.steps = 0
        self.history = []
        self.returns = [0.0] * len(self.agents)
        self.alive = [agent in observations for agent in self.agents]
        self._view.begin([observations.get(agent) for agent in self.agents])

    def step(self, actions: Any) -> tuple[list[float], list[bool], list[bool]]:
        """Take each agent's action; reward, terminated and truncated of each, a dead one's being 0, True
        and False."""
        alive = self.alive
        reward = [0.0] * len(alive)
        terminated = [not living for living in alive]
        truncated = [False] * len(alive)
        seen: list[list[Any]] = [[] for _ in alive]
        for _ in range(self._skip):
            playing = self.env.agents
            observations, rewards, terminations, truncations, _ = self.env.step(
                {agent: actions[j] for j, agent in enumerate(self.agents) if agent in playing}
            )
            playing = self.env.agents
            for j, agent in enumerate(self.agents):
                if not alive[j]:
                    continue
                reward[j] += float(rewards.get(agent, 0.0))
                if agent in observations:
                    seen[j].append(observations[agent])
                truncated[j] = bool(truncations.get(agent, False))
                terminated[j] = bool(terminations.get(agent, False))
                if agent not in playing and not truncated[j]:
                    terminated[j] = True  # it left without a flag
                alive[j] = not (terminated[j] or truncated[j])
            if not any(alive):
                break
        self.steps += 1
        if self._limit is not None and self.steps >= self._limit:
            truncated = [cut or living for cut, living in zip(truncated, alive, strict=True)]
            self.alive = [False] * len(alive)
        for j, value in enumerate(reward):
            self.returns[j] += value
        self._view.add(seen)
        return reward, terminated, truncated

    def observe(self, out: np.ndarray, was_alive: Sequence[bool] | np.ndarray | None = None) -> None:
        """Write what each agent sees into `out` `[A, *D]`, where it lives (or did, before a step)."""
        shown = np.asarray(self.alive if was_alive is None else was_alive, np.bool_)
        self._view.write(out, shown)


def _random_state(env: ParallelEnv) -> dict[str, Any] | None:
    """State of the generator that the environment keeps as `np_random`; None where it has none."""
    kept = vars(getattr(env, "unwrapped", env))
    generator = kept.get("np_random", kept.get("_np_random"))
    if not isinstance(generator, np.random.Generator):
        return None
    return copy.deepcopy(dict(generator.bit_generator.state))
