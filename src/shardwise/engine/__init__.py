"""When: in which order units are gathered, used, reduced and freed.

Reading order: ``nest``, ``order``, ``prefetch``, ``reductions``, ``runtime``, ``hooks``, ``api``,
``accumulate``, ``gathered``, ``describe``.
"""
