"""Which stored tensors make which parameter: transformers' own renamings and conversions, planned.

Note [Conversions by rows]
transformers 5 joins what older checkpoints store apart: the experts of a mixture become one tensor
with an expert per row. Where a conversion stacks its sources along dim 0 and then only joins the
stacks along other dims, row ``e`` needs the sources number ``e`` alone, so a rank reads those of
its own rows. Any other conversion gets its sources whole on every rank, one parameter at a time.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from shardwise.checkpoint.container import torch_dtype
from shardwise.checkpoint.source import TensorInfo
from shardwise.errors import CheckpointError

Part = tuple[str, TensorInfo]


@dataclass(frozen=True)
class Recipe:
    """How parameters or buffers are made of stored tensors.

    Without ``converter`` the one target is the one stored tensor. With it, ``parts`` are its
    sources, each with the pattern that it matches, in the order in which they are given to it.
    """

    targets: tuple[str, ...]
    parts: tuple[Part, ...]
    converter: Any = None

    @property
    def is_by_rows(self) -> bool:
        """Tell whether each row needs its own sources only. See Note [Conversions by rows]."""
        if self.converter is None or len(self.targets) != 1:
            return False
        first, *others = self.converter.operations
        stacks = type(first) is MergeModulelist and first.dim == 0
        return stacks and all(type(op) is Concatenate and op.dim > 0 for op in others)


def match_keys(
    model: Any, infos: Sequence[TensorInfo], mapping: Sequence[Any], report: Any
) -> dict[str, Recipe]:
    """Return the recipe of every parameter and buffer that can be made, by its name.

    ``mapping`` are transformers' transforms for this model; ``report`` is its account of what is
    missing, unexpected or of another shape, which is filled in.

    **Raises** CheckpointError when two stored tensors are for one parameter.
    """
    expected = model.state_dict()
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    direct: dict[str, TensorInfo] = {}
    grouped: dict[str, list[Part]] = {}
    prefix = getattr(model, "base_model_prefix", "")
    for info in sorted(infos, key=lambda i: dot_natural_key(i.name)):
        name, pattern = rename_source_key(info.name, renamings, converters, prefix, expected)
        if name not in expected and info.name in expected:
            name, pattern = rename_source_key(info.name, [], [], prefix, expected)
        if name in expected and pattern is not None:
            grouped.setdefault(name, []).append((pattern, info))
        elif name in expected:
            if direct.setdefault(name, info) is not info:
                both = f"'{direct[name].name}' and '{info.name}'"
                raise CheckpointError(f"the stored tensors {both} are both for '{name}'")
        elif pattern is not None:
            first, *_ = patterns = by_pattern[pattern].target_patterns
            report.unexpected_keys |= {name.replace(first, target) for target in patterns}
        else:
            report.unexpected_keys.add(name)
    made = [(Recipe((n,), (("", info),)), {n: info.shape}) for n, info in direct.items()]
    for name, parts in grouped.items():
        recipe = Recipe((name,), tuple(parts), by_pattern[parts[0][0]])
        empty = [
            torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
            for _, info in parts
        ]
        shapes = {n: tuple(t.shape) for n, t in convert(recipe, empty, model, report).items()}
        made.append((Recipe(tuple(shapes), recipe.parts, recipe.converter), shapes))
    return _of_right_shape(made, expected, report)


def convert(
    recipe: Recipe,
    tensors: Sequence[torch.Tensor],
    model: Any,
    report: Any,
    parts: Sequence[Part] | None = None,
) -> dict[str, torch.Tensor]:
    """Run a recipe's conversion on its sources, or on those of some rows; empty if it fails.

    What failed is in ``report`` then.
    """
    converter = deepcopy(recipe.converter)
    name = recipe.targets[0]
    for (pattern, info), tensor in zip(parts or recipe.parts, tensors, strict=True):
        converter.add_tensor(name, info.name, pattern, tensor)
    try:
        made = converter.convert(name, model=model, config=model.config, loading_info=report)
    except SkipParameters:
        return {}
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def _of_right_shape(
    made: Sequence[tuple[Recipe, Mapping[str, tuple[int, ...]]]],
    expected: Mapping[str, torch.Tensor],
    report: Any,
) -> dict[str, Recipe]:
    """Keep what the model has in this shape; tell the report of the rest."""
    recipes = {}
    for recipe, shapes in made:
        for name, shape in shapes.items():
            report.missing_keys.discard(name)
            if name not in expected:
                report.unexpected_keys.add(name)
            elif tuple(shape) != tuple(expected[name].shape):
                report.mismatched_keys.add((name, torch.Size(shape), expected[name].shape))
            else:
                recipes[name] = recipe
    return recipes
