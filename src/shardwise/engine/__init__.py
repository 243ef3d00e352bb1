"""When: in which order units are gathered, used, reduced and freed.

Reading order: ``tree``, ``order``, ``prefetch``, ``schedule`` (every decision of a step),
``reductions``, ``calls``, ``passes`` (which are open), ``conditions``, ``runtime``, ``hooks``,
``agreement`` (were all ranks started alike), ``api``, ``accumulate``, ``gathered``, ``describe``,
``replicas`` (do copies have the same bits).
"""
