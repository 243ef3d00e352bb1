"""Everything of shardwise, imported once in the server that ranks are forked from: see `ranks`.

Its names are imported on first use, which every rank of every group would do again.
"""

import contextlib
import importlib
import pkgutil

import shardwise

for module in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of another library that is not installed
            importlib.import_module(module.name)
