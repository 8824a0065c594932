"""Building an algorithm: what is said about the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl import build
from tests.conftest import algorithm, small


class TestBF16:
    @pytest.mark.parametrize(
        ("flags", "has"), [("fpu avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True), ("avx512f", False)]
    )
    def test_cpu_flags(self, flags: str, has: bool, tmp_path: Path) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
        assert build.cpu_computes_bf16(tmp_path / "cpuinfo") is has

    def test_a_cpu_without_it_is_warned_about(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(build, "cpu_computes_bf16", lambda: False)
        algorithm(*small("ppo", "precision=bf16")).close()
        assert "precision=bf16" in caplog.text and "precision=fp32" in caplog.text

    @pytest.mark.parametrize("recipe", ["ppo_atari", "ppo_atari_lstm", "dqn_atari", "sac_atari"])
    def test_pixels_learn_in_it(self, recipe: str) -> None:
        algo = algorithm(*small(recipe, "precision=bf16", "total_timesteps=1300"))
        metrics = [algo.iterate() for _ in range(2)]
        algo.close()
        losses = {k: v for k, v in metrics[-1].scalars.items() if k.startswith("losses/")}
        assert losses and all(value == value for value in losses.values())
