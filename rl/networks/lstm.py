"""Memory around any encoder: an LSTM (Hochreiter & Schmidhuber 1997) over its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl.errors import ConfigError
from rl.schemas import bounded

if TYPE_CHECKING:
    from rl.networks.recurrent import RecurrentEncoder


@dataclass(frozen=True)
class LSTM:
    """An encoder, itself an option of the group `network`, and an LSTM over its features.

    What an encoder offers: `check(observation_space, group)`, `build`, `features`, `shared` and `recurrent`.
    """

    recurrent: ClassVar[bool] = True

    encoder: Any = bounded()
    hidden_size: int = bounded(ge=1)
    num_layers: int = bounded(ge=1)

    @property
    def shared(self) -> bool:
        """One trunk for actor and critic, where the encoder is one."""
        return bool(self.encoder.shared)

    def check(self, observation_space: Any, group: str = "network") -> None:
        """Raise ConfigError for observations that the encoder does not take, or an encoder with a memory of
        its own."""
        inner = f"network@{group.rpartition('@')[2]}.encoder"
        if getattr(self.encoder, "recurrent", True):
            raise ConfigError(f"{inner}: choose an encoder without memory, e.g. {inner}=nature_cnn")
        self.encoder.check(observation_space, inner)

    def build(self, observation_shape: tuple[int, ...]) -> RecurrentEncoder:
        """The recurrent encoder; see its `forward`. Weights of the LSTM are orthogonal, biases 0."""
        from rl.networks.recurrent import RecurrentEncoder

        encoder, features = self.encoder.build(observation_shape), self.encoder.features(observation_shape)
        return RecurrentEncoder(encoder, features, self.hidden_size, self.num_layers)

    def features(self, observation_shape: tuple[int, ...]) -> int:
        """The size of the LSTM's output."""
        return self.hidden_size
