"""One unit: its ShardTensors, its storage, how it is filled, unsharded and reduced.

Reading order: ``states``, ``operations``, ``norms``, ``cut``, ``sliced``, ``answers``, ``tensor``,
``storage``, ``partial``, ``unit``, ``materialize``, ``reduce``.
"""
