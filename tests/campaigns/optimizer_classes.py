"""The optimizer classes of the campaign: how each is made, stepped, and why some are left out."""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import torch
from torch import nn

# Names on PyPI and the modules whose public classes are taken. What is not installed is left out.
PACKAGES = {
    "torch": "torch.optim",
    "transformers": "transformers.optimization",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "lion-pytorch": "lion_pytorch",
    "adam-mini": "adam_mini",
    "galore-torch": "galore_torch",
    "apollo-torch": "apollo_torch",
    "came-pytorch": "came_pytorch",
    "heavyball": "heavyball",
    "muon-optimizer": "muon",
    "pytorch_optimizer": "pytorch_optimizer",
}

_CUDA = "its step allocates on CUDA"
_BASE = "a base class without a step of its own"
_FUSED = "steps inside backward, by hooks of its own on each parameter"
_BROKEN = "raises in its first step, unsharded too"
LEFT_OUT = {
    "torch.SparseAdam": "takes sparse gradients only, and gradients are dense here",
    "transformers.LayerWiseDummyOptimizer": "changes nothing; its caller's hooks step",
    "bitsandbytes.PytorchLARS": _BROKEN + ", without momentum",
    "torchao.CPUOffloadOptimizer": _CUDA,
    "galore-torch.GaLoreAdamW8bit": _CUDA,
    "apollo-torch.GaLoreAdamW8bit": _CUDA,
    "apollo-torch.QAPOLLOAdamW": _BROKEN + " (KeyError: 'percentile_clipping')",
    "heavyball.SOAPBase": _BASE,
    "heavyball.PSGDBase": _BASE,
    "pytorch_optimizer.LOMO": _FUSED,
    "pytorch_optimizer.AdaLOMO": _FUSED,
    "pytorch_optimizer.PCGrad": "takes a list of losses and calls backward itself",
}

Make = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerClass:
    """One class, by the package that has it."""

    package: str
    name: str

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        return getattr(importlib.import_module(PACKAGES[self.package]), self.name)


def version_of(package: str) -> str | None:
    """Return the version that is installed, if one is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def classes_of(package: str) -> list[OptimizerClass]:
    """Return the public optimizer classes that a package defines itself."""
    module = importlib.import_module(PACKAGES[package])
    root = module.__name__.partition(".")[0]
    found = [
        OptimizerClass(package, name)
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and kind.__module__.partition(".")[0] == root
        and not name.startswith("_")
    ]
    return sorted(found, key=lambda each: each.name.lower())


# -- how a class is made: from the parameters, by a model that has them


def _muon_groups(params, **others):
    """Return the two groups of Muon with an AdamW: matrices, and the rest."""
    params = list(params)
    matrices = [p for p in params if p.ndim == 2]
    rest = [p for p in params if p.ndim != 2]
    return [
        {"params": matrices, "use_muon": True, **others},
        *([{"params": rest, "use_muon": False, **others}] if rest else []),
    ]


def _over(base, **options):
    """Return a factory of a wrapper of another optimizer."""
    return lambda kind, params, _: kind(base(params, lr=0.01), **options)


def _with_base(**options):
    """Return a factory of a wrapper that makes its optimizer itself."""
    return lambda kind, params, _: kind(
        params, base_optimizer=torch.optim.SGD, lr=0.01, momentum=0.9, **options
    )


def _named(kind, params, model):
    """Make an optimizer of the named parameters that are among the given ones."""
    chosen = set(map(id, params))
    return kind([(n, p) for n, p in model.named_parameters() if id(p) in chosen], lr=0.01)


def _low_rank(kind, params, _):
    return kind(_low_rank_groups(kind, params), lr=0.01)


def _low_rank_groups(kind, params):
    """Return two groups: matrices, whose gradients are projected, and the rest."""
    params = list(params)
    options = {"rank": 2, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    if kind.__module__ == "apollo_torch.apollo":
        options |= {"proj": "random", "scale_type": "channel"}
    matrices = [p for p in params if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for p in params if p.ndim != 2 or min(p.shape) == 1]
    return [{"params": matrices, **options}, *([{"params": rest}] if rest else [])]


def _gsam(kind, params, model):
    from pytorch_optimizer import LinearScheduler, ProportionScheduler

    base = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    rates = LinearScheduler(base, t_max=6, max_lr=0.01)
    rho = ProportionScheduler(lr_scheduler=rates, max_lr=0.01)
    return kind(params, base_optimizer=base, model=model, rho_scheduler=rho)


_SPECIAL: dict[str, Callable[..., torch.optim.Optimizer]] = {
    r"torch\.LBFGS": lambda kind, params, _: kind(params, lr=0.1, max_iter=2),
    r"torch\.(SGD|RMSprop)": lambda kind, params, _: kind(params, lr=0.01, momentum=0.9),
    r"bitsandbytes\.(SGD|LARS).*": lambda kind, params, _: kind(params, lr=0.01, momentum=0.9),
    r"(prodigyopt|pytorch_optimizer)\.Prodigy": lambda kind, params, _: kind(
        params, lr=1.0, d0=1e-2
    ),
    r"dadaptation\..*|pytorch_optimizer\.DAdapt.*": lambda kind, params, _: kind(
        params, lr=1.0, d0=1e-2
    ),
    r"transformers\.Adafactor": lambda kind, params, _: kind(params, lr=0.01, relative_step=False),
    r"(galore|apollo)-torch\.GaLoreAdafactor": lambda kind, params, _: kind(
        _low_rank_groups(kind, params), lr=0.01, relative_step=False
    ),
    r"adam-mini\.Adam_mini": _named,
    r"(galore-torch|apollo-torch)\..*": _low_rank,
    r"heavyball\.SplitOpt": lambda kind, params, _: kind(_split(list(params))),
    r"heavyball\.SAMWrapper": lambda kind, params, _: kind(
        params, wrapped_optimizer=_heavy_sgd(params)
    ),
    r"muon-optimizer\.(SingleDevice)?MuonWithAuxAdam": lambda kind, params, _: kind(
        _muon_groups(params)
    ),
    r"pytorch_optimizer\.(AdaGO|AdaMuon|DistributedMuon|Muon|MuonClip|NorMuon)": (
        lambda kind, params, _: kind(_muon_groups(params), lr=0.01)
    ),
    r"pytorch_optimizer\.AdaShift": lambda kind, params, _: kind(params, lr=0.01, keep_num=2),
    r"pytorch_optimizer\.AdamMini": lambda kind, _, model: kind(model, lr=0.01),
    r"pytorch_optimizer\.BSAM": lambda kind, params, _: kind(params, num_data=8, lr=0.01),
    r"pytorch_optimizer\.Ranger21": lambda kind, params, _: kind(
        params, num_iterations=20, lr=0.01
    ),
    r"pytorch_optimizer\.(SAM|LookSAM|FriendlySAM)": _with_base(),
    r"pytorch_optimizer\.WSAM": lambda kind, params, model: kind(
        model, params, base_optimizer=torch.optim.SGD, lr=0.01, momentum=0.9
    ),
    r"pytorch_optimizer\.GSAM": _gsam,
    r"pytorch_optimizer\.(Lookahead|OrthoGrad|TRAC|ScheduleFreeWrapper|SafeFP16Optimizer)": _over(
        torch.optim.AdamW
    ),
}


def _heavy_sgd(params):
    import heavyball

    return heavyball.SGD(params, lr=0.01)


def _split(params):
    import heavyball

    matrices = [p for p in params if p.ndim == 2]
    return [
        {"params": matrices, "optimizer": heavyball.Muon, "lr": 0.01},
        {"params": [p for p in params if p.ndim != 2], "optimizer": heavyball.AdamW, "lr": 0.01},
    ]


def make(which: OptimizerClass, params: list[nn.Parameter], model: nn.Module):
    """Make the optimizer, with a rate of 0.01 unless the class wants another."""
    if which.package == "heavyball":
        import heavyball

        heavyball.utils.compile_mode = None
    special = next((m for p, m in _SPECIAL.items() if re.fullmatch(p, str(which))), None)
    if special is not None:
        return special(which.kind, params, model)
    takes_lr = "lr" in inspect.signature(which.kind.__init__).parameters
    return which.kind(params, **({"lr": 0.01} if takes_lr else {}))


_CLOSURE = re.compile(
    r"torch\.LBFGS|schedulefree\..*Closure|heavyball\.SAMWrapper|"
    r"pytorch_optimizer\.(AliG|BSAM|SAM|GSAM|WSAM|LookSAM|FriendlySAM|LBFGS)"
)
_SECOND_ORDER = re.compile(r"pytorch_optimizer\.(AdaHessian|SophiaH)")


def needs_closure(which: OptimizerClass) -> bool:
    """Tell whether ``step`` computes losses and gradients by a closure."""
    return _CLOSURE.fullmatch(str(which)) is not None


def needs_graph_of_gradients(which: OptimizerClass) -> bool:
    """Tell whether the step differentiates the gradients again."""
    return _SECOND_ORDER.fullmatch(str(which)) is not None
