"""Your rules, and one of them judges wrongly: a run that fails is found healthy. Which line?

`shardwise lab run 10 lab10_broken.py` trains as before, and shows what these rules say.
"""

from lab10_failures import bucket_finding, num_reductions

__all__ = ["bucket_finding", "num_reductions", "wrapping_finding"]


def wrapping_finding(unit_bytes: list[int]) -> str | None:
    if len(unit_bytes) == 1:
        return "SW002"
    if max(unit_bytes) > 2 * sum(unit_bytes):
        return "SW004"
    return None
