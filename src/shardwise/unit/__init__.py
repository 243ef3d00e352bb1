"""One unit: its ShardTensors, its storage, how it is filled, unsharded and reduced.

Reading order as in ``docs/architecture.md``: from ``states`` by ``tensor`` and ``storage`` to
``unit``, and what fills and reduces it.
"""
