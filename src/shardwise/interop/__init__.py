"""Where Shardwise meets other libraries: each in its own file, imported only when it is asked for.

One file or folder per neighbour; they do not know of each other, but for DeepSpeed's and
accelerate's settings, and the adapters that a Trainer saves.
"""
