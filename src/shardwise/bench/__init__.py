"""Measures what this machine does, with all its ranks at work at once: `shardwise bench`.

Reading order: ``together`` (the stopwatch of several ranks), ``glue`` (a decoder without its
products), then one file per thing measured: ``compute``, ``state`` (optimizer, sums, copies),
``network`` (collectives, and what they cost a computation beside them), ``links`` (host link and
disk), ``engine`` (the host's code per unit); ``calibrate`` puts them into one calibration.
"""
