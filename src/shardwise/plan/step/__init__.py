"""A tape under a candidate: the engine's schedule, played with units that only count bytes."""
