"""Other libraries: each has a file or a folder, imported only when it is asked for.

They do not know of each other, except for DeepSpeed's and accelerate's settings, and the adapters
that a Trainer saves. `stream` serves any of them.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.interop.streaming import stream as stream

_MODULES = ("accelerate", "deepspeed", "lightning", "peft", "torchtitan", "transformers")
_HOMES = {name: f"shardwise.interop.{name}" for name in _MODULES}
__all__ = ["stream"]
__getattr__, __dir__ = lazily(__name__, {**_HOMES, "stream": "shardwise.interop.streaming"})
