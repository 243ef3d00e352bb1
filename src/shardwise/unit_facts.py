"""The facts of one unit, as descriptions and records of runs have them."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Name = Annotated[str, Field(max_length=1000)]


@dataclass(frozen=True)
class UnitFacts:
    """One unit of a model; bytes in the master dtype, padding summed over the ranks.

    ``home`` is the place of state that is not on the device. ``num_modules`` is the number of
    modules that hold the parameters; 0 in a record of an earlier version.
    """

    name: _Name
    class_name: _Name
    num_params: _Count
    numel: _Count
    full_bytes: _Count
    rank_bytes: _Count
    padding_bytes: _Count
    dtype: _Name
    layout: _Name
    home: _Name = ""
    num_modules: _Count = 0

    @property
    def padding_share(self) -> float:
        """Padding as a share of the unit's bytes."""
        return self.padding_bytes / self.full_bytes if self.full_bytes else 0.0
