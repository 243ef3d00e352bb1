"""Labs of memory sharding: a reader fills the gaps of one file, and `shardwise lab` checks it.

Reading order: course (what a lab is), reader (the reader's file), counting (bytes sent and held),
words (verdicts), ranks (processes), then one package per lab. Only labs about the engine (6, 10 to
12) import `shardwise`.
"""
