"""A tape under a candidate: the engine's schedule, played with units that only count bytes.

Reading order: ``program`` (operations on streams), ``ledger`` (where the bytes are), ``messages``
(one collective on either transport), ``footprint`` (one unit's bytes), ``meter``, ``issue``,
``offloading``, ``doubles``, ``play``.
"""
