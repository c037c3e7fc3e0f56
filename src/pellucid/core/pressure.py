"""How hard memory is fought over: preempted sequences do not come back too early, storms do not feed themselves.

Two numbers. `headroom`: free blocks that admission leaves for each running sequence beyond its next token; it doubles
with a step that preempts (1, 2, 4, up to 8) and halves after `CALM_STEPS` steps without. `storm`: tokens lost to
preemption exceed `STORM_SHARE` of the tokens computed, both averaged over about 100 steps; while it lasts no request is
started that was not running before. Neither holds anything back while nothing runs.
"""

from __future__ import annotations

MAX_HEADROOM = 8
CALM_STEPS = 64
STORM_SHARE = 0.2
_MEMORY = 0.01


class Pressure:
    """Fed once a step with what it computed and what it lost."""

    def __init__(self) -> None:
        self.headroom = 0
        self.num_storms = 0
        self.storm = False
        self._computed = 0.0
        self._lost = 0.0
        self._calm = 0

    @property
    def lost_share(self) -> float:
        """Tokens lost to preemption over tokens computed, recently."""
        return self._lost / self._computed if self._computed > 0 else 0.0

    def step(self, num_computed: int, num_lost: int, num_preempted: int) -> None:
        """A step was decided: tokens it computes, computed tokens that preempted sequences lost, and how many those
        were."""
        self._computed += _MEMORY * (num_computed - self._computed)
        self._lost += _MEMORY * (num_lost - self._lost)
        if num_preempted:
            self._calm = 0
            self.headroom = min(MAX_HEADROOM, max(1, 2 * self.headroom))
        else:
            self._calm += 1
            if self._calm % CALM_STEPS == 0:
                self.headroom //= 2
        storm = self.lost_share > STORM_SHARE
        self.num_storms += storm and not self.storm
        self.storm = storm
