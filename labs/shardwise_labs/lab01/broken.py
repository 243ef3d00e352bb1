"""An accounting that is yours but for one stage, as of a run that divides too little.

`shardwise lab run 1 lab01_broken.py` puts it beside the measured bytes. Find the wrong line.
"""

import lab01_memory as yours

__all__ = ["bytes_per_rank", "zero3_peak"]
zero3_peak = yours.zero3_peak


def bytes_per_rank(
    numel: int, dp: int, param: float = 4, grad: float = 4, adam: float = 8
) -> dict[str, float]:
    alone = yours.bytes_per_rank(numel, 1, param, grad, adam)
    divided = yours.bytes_per_rank(numel, dp, param, grad, adam)
    return {
        "replicated": alone["replicated"],
        "zero1": alone["zero1"],
        "zero2": divided["zero2"],
        "zero3": divided["zero3"],
    }
