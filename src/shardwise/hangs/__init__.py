"""Hangs and deaths of ranks.

Reading order: ``heartbeat`` (the state of each rank in the store), ``diagnosis`` (the waits of this
process, and a table of the ranks that one needs), ``abort`` (the rule that ends a wait). The
package attaches the watch to `comm.listener`.
"""
