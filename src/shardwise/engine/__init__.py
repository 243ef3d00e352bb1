"""When: in which order units are gathered, used, reduced and freed.

Reading order: ``order``, ``prefetch``, ``runtime``, ``hooks``, ``accumulate``, ``gathered``,
``describe``, ``api``.
"""
