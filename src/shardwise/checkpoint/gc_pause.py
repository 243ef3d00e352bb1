"""Python's garbage collector, held back while a checkpoint is planned.

Note [The collector while planning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A save or a load makes some ten objects for each tensor, keeps them to its end, and none of them is
in a cycle. To the collector so many new ones are a sign to look at every object of the process:
200 ms where torch is loaded, in every second save of 1,500 tensors, on any of the ranks, and the
others wait. It is held back where training stands still anyway, and not behind a training.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage meanwhile, on any thread; afterwards as before.

    See Note [The collector while planning].
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
