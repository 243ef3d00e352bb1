"""The checkpoints of a run: when one is written, what it holds beside the model, how a run goes on.

Note [A resumed run]
~~~~~~~~~~~~~~~~~~~~
It takes the same steps to the bit. What a step depends on is either in the checkpoint (parameters,
optimizer, loss scaler, each rank's generators) or a pure function of the config and of the step's
number (data, learning rate). So the config stands in the checkpoint too: a key that makes another
model is refused, any other that changes the steps is told.

Note [When a save fails]
~~~~~~~~~~~~~~~~~~~~~~~~
A background save ends at its own time on each rank. If one rank raised at once, the others would
wait for it in the next gather. So a rank says that its save failed in the sum that the ranks form
at the end of each step, and all raise after the same step; the library's own check, at the start of
a forward pass, is taken out.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardwise.checkpoint.checkpoints import Checkpoints, Saving
from shardwise.checkpoint.loading import Loaded
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.monitor.lines import JsonLines
from shardwise.progress import byte_bar
from shardwise.train.checks import checkpoints_path
from shardwise.train.config import TrainConfig
from shardwise.train.setup import Run

_MODEL_KEYS = (
    *("dim", "layers", "heads", "kv_heads", "ffn_multiple", "vocab", "tied_head", "tokenizer"),
    *("experts", "experts_per_token", "expert_ffn_multiple", "shared_experts", "dense_layers"),
    *("expert_scoring", "expert_bias"),
    "optimizer",  # its state is of another kind
)
_TOLD_KEYS = (
    *("seq", "dropout", "stage", "layout", "precision", "reduce_every", "activation_checkpointing"),
    *("gather", "reduce", "gather_block", "offload", "overlap_step"),
    *(
        "dp_replicate",
        "dp_shard",
        "tp",
        "pp",
        "pp_schedule",
        "cp",
        "cp_method",
        "ep",
        "expert_balance",
        "units",
    ),
    *("micro_batch", "accumulation", "global_batch", "accumulation_order"),
    *("steps", "lr", "min_lr", "schedule"),
    *("warmup_steps", "weight_decay", "beta1", "beta2", "grad_clip", "seed", "data"),
    *("optimizer_options", "schedule_options", "loss_scale_window"),
    *("eval_windows", "source"),
)


@dataclass(frozen=True)
class Resumed:
    """The step that a run goes on from; bytes that this rank read, and how long that took."""

    step: int
    num_bytes: int
    load_s: float


def find_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], saved_ranks: int, ranks: int
) -> list[str]:
    """Return one line for each setting that is not as in the checkpoint and changes the steps.

    **Raises** ConfigError: a setting that makes another model has changed.
    """
    for key in _MODEL_KEYS:
        before = saved.get(key, _default_of(key))  # an older version did not know the key
        if before != now.get(key):
            raise ConfigError(
                f"{key}: the checkpoint is of a model with {key} {before}, got "
                f"{now.get(key)}; set it back, or start a new run in another output"
            )
    lines = []
    if saved_ranks != ranks:
        lines.append(
            f"ranks: {saved_ranks} -> {ranks}; random numbers (dropout) go on from new seeds"
        )
    for key in _TOLD_KEYS:
        before = saved.get(key, _default_of(key))
        if before != now.get(key):
            change = f"{before} -> {now.get(key)}"
            lines.append(
                "data: the text files have changed since" if key == "source" else f"{key}: {change}"
            )
    return lines


def _default_of(key: str) -> Any:
    field = TrainConfig.model_fields.get(key)
    return field.default if field is not None else None


class RunCheckpoints:
    """All checkpoints of one run, as its keys ask for them; a context, which holds the folder.

    It is there to do nothing when a run neither saves nor resumes. See Note [When a save fails].
    """

    def __init__(self, run: Run) -> None:
        config = run.config
        self._run = run
        self._saving: Saving | None = None
        self._settings = _settings(run)
        self._reserved = False
        self._waited_s = 0.0
        self._keeper: Checkpoints | None = None
        self.saved_step: int | None = None
        self.stall_s = 0.0
        engine, folder = engine_of(run.model), checkpoints_path(config)
        # Where there is a folder another run may be at work: its lock tells.
        asked = config.save_every > 0 or config.resume != "never" or folder.exists()
        if engine.everyone.broadcast(bytes([asked])) != b"\0":
            self._keeper = Checkpoints(
                folder,
                run.model,
                run.optimizer,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
            )
            self._keeper.check_when_asked()

    def resume(self, say: Callable[[str], None]) -> Resumed | None:
        """Load what the run goes on from, if anything; say from where, and what has changed.

        **Raises** ConfigError: the checkpoint is of another model; CheckpointError: none can be
        used.
        """
        run, choice = self._run, self._run.config.resume
        if self._keeper is None or choice == "never":
            return None
        groups = run.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        started_s = time.perf_counter()
        with byte_bar("load", None, shown=run.place.rank == 0) as progress:
            step = None if choice == "auto" else choice
            loaded = self._keeper.load(step=step, progress=progress)
        if loaded is None:
            return None
        load_s = time.perf_counter() - started_s
        for group, ours in zip(groups, settings, strict=True):
            group.update(ours)  # the keys of this run count, not those of the saved one
        saved = _saved_settings(loaded)
        scale = loaded.extra.get("scaler")
        if run.scaler.is_enabled() and scale:
            run.scaler.load_state_dict(scale)
            window = run.config.loss_scale_window
            if saved.get("loss_scale_window", window) != window:
                run.scaler.set_growth_interval(window)
        step = _step_of(loaded)
        lines = find_changes(saved, self._settings, loaded.num_ranks_saved, run.place.world_size)
        say(f"going on from step {step} ({loaded.path})")
        for line in lines:
            say(f"changed since then: {line}")
        return Resumed(step, loaded.num_bytes, load_s)

    @property
    def failed(self) -> bool:
        """Tell whether the save in the background failed; it is raised by `finish`."""
        return self._saving is not None and self._saving.failed

    def after_step(self, step: int, is_last: bool, metrics: JsonLines) -> None:
        """Save if it is time to; write the line of a save that has ended.

        **Raises** CheckpointError: a save failed; the same on all ranks.
        """
        keeper, every = self._keeper, self._run.config.save_every
        if not self.failed:
            self._report(metrics)
        if keeper is None or not every:
            return
        if not self._reserved and self._run.optimizer.state:
            self.finish(metrics)
            keeper.reserve()
            self._reserved = True
        if step % every == 0 or is_last:
            self._save(keeper, step, metrics)

    def finish(self, metrics: JsonLines) -> None:
        """Wait for the save under way, and write its line.

        **Raises** CheckpointError: it failed; the same on all ranks.
        """
        if self._keeper is not None:
            self._keeper.finish()
            self._report(metrics)

    def _save(self, keeper: Checkpoints, step: int, metrics: JsonLines) -> None:
        started_s = time.perf_counter()
        self.finish(metrics)
        self._waited_s = time.perf_counter() - started_s
        run = self._run
        extra = {"settings": self._settings, "scaler": run.scaler}
        wait = not run.config.save_in_background
        started_s = time.perf_counter()
        self._saving = keeper.save(step, extra=extra, wait=wait)
        self.stall_s += time.perf_counter() - started_s
        if wait:
            self._report(metrics)

    def _report(self, metrics: JsonLines) -> None:
        saving = self._saving
        if saving is None or not saving.done:
            return
        self._saving = None
        written = saving.wait()
        self.saved_step = saving.step
        metrics.write(
            step=saving.step,
            save_stall_s=saving.stall_s,
            save_waited_s=self._waited_s,
            save_s=saving.write_s,
            saved_bytes=written.num_bytes,
            save_bytes_per_s=written.num_bytes / max(saving.write_s, 1e-9),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._keeper is not None:
            self._keeper.__exit__(*error)


def _settings(run: Run) -> dict[str, Any]:
    """Return the keys of this run as decided, and a fingerprint of its text."""
    header = json.loads((run.config.output / "tokens.json").read_text(encoding="utf-8"))
    return {**run.config.model_dump(mode="json"), "source": header["source"]}


def _saved_settings(loaded: Loaded) -> Mapping[str, Any]:
    settings = loaded.extra.get("settings")
    if not isinstance(settings, Mapping):
        raise CheckpointError(
            f"{loaded.path}: it was not saved by `shardwise train`, which keeps its settings there"
        )
    return settings


def _step_of(loaded: Loaded) -> int:
    if loaded.step is None:
        raise CheckpointError(f"{loaded.path}: it does not say of which step it is")
    return loaded.step
