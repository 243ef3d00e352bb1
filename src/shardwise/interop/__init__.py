"""Where Shardwise meets other libraries: each in its own file, imported only when it is asked for.

Reading order: ``versions`` (which versions were tested), then one file or folder per neighbour.
"""
