"""One unit: its ShardTensors, its storage, how it is filled, unsharded and reduced.

Reading order: ``states``, ``operations``, ``tensor``, ``norms``, ``storage``, ``materialize``,
``unit``, ``reduce``.
"""
