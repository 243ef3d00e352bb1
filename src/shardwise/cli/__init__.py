"""The command line: parse, call, print. Environment variables are read in this package only.

Importing it imports no torch, so that `shardwise --help` answers at once.
"""
