"""The checkpoints of a run: when they are written, their settings, and resuming from them.

Note [A resumed run]
~~~~~~~~~~~~~~~~~~~~
It takes bit-identical steps. A step depends on state in the checkpoint (parameters, optimizer, loss
scaler) and on pure functions of the config and the step's number (data, random numbers, learning
rate). The config is therefore in the checkpoint too: a changed key is refused if it makes
another model, and reported if it changes the steps.

Note [When a save fails]
~~~~~~~~~~~~~~~~~~~~~~~~
A background save ends at different times on different ranks. If one rank raised at once, the others
would wait for it in the next gather. So a rank adds a failed save to the sum that the ranks form at
the end of each step, and all raise after the same step. The library's own check at the start of a
forward pass is turned off.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from shardwise.checkpoint.checkpoints import Checkpoints, Saving
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.keys import names_in
from shardwise.monitor.lines import JsonLines
from shardwise.progress import byte_bar
from shardwise.train.checks import checkpoints_path
from shardwise.train.config import TrainConfig
from shardwise.train.setup import Run

_TRAINED_WITH = ("seq", "dropout", "expert_balance")  # in the model's panels, not of the model
_NO_EFFECT = ("prefetch_bytes", "bucket_bytes", "loss_scale", "optimizer")  # or reported above


_MODEL_KEYS = [key for key in names_in(TrainConfig, "Model", "Experts") if key not in _TRAINED_WITH]
_MODEL_KEYS += ["tokenizer", "optimizer"]  # an optimizer's state is of one kind
_PANELS = names_in(TrainConfig, "Sharding", "Degrees", "Batch", "Optimizer")
_STEP_KEYS = [*_TRAINED_WITH, *(key for key in _PANELS if key not in _NO_EFFECT)]
_STEP_KEYS += ["data", "eval_windows", "source"]


class Resumed(NamedTuple):
    """The step that a run resumed from, and the bytes that this rank read: a line of metrics."""

    step: int
    from_memory: bool
    load_s: float
    loaded_bytes: int
    load_bytes_per_s: float


def find_changes(
    saved: Mapping[str, object], now: Mapping[str, object], saved_ranks: int, ranks: int
) -> list[str]:
    """Return a line for each setting that differs from the checkpoint's and changes the steps.

    **Raises** ConfigError if a changed setting makes another model.
    """
    fields = TrainConfig.model_fields
    defaults = {key: fields[key].default for key in fields}  # of keys that an older version lacked
    before = {key: saved.get(key, defaults.get(key)) for key in (*_MODEL_KEYS, *_STEP_KEYS)}
    changed = [key for key in before if before[key] != now.get(key)]
    for key in changed:
        if key in _MODEL_KEYS:
            raise ConfigError(
                f"{key}: the checkpoint is of a model with {key} {before[key]}, got "
                f"{now.get(key)}; set it back, or start a new run in another output"
            )
    lines = []
    if saved_ranks != ranks:
        in_one_call = now.get("pp") != 1 or now.get("accumulation_order") == "breadth_first"
        draws = "; dropout draws other random numbers" if now.get("dropout") and in_one_call else ""
        lines.append(f"ranks: {saved_ranks} -> {ranks}{draws}")
    return lines + [
        "data: the text files have changed since"
        if key == "source"
        else f"{key}: {before[key]} -> {now.get(key)}"
        for key in changed
    ]


class RunCheckpoints:
    """All checkpoints of one run; a context that locks their folder.

    If the run neither saves nor resumes, it does nothing. See Note [When a save fails].
    """

    def __init__(self, run: Run) -> None:
        config = run.config
        self._run = run
        self._saving: Saving | None = None
        header = json.loads((config.output / "tokens.json").read_text(encoding="utf-8"))
        # The decided keys of this run, and a fingerprint of its text.
        self._settings = {**config.model_dump(mode="json"), "source": header["source"]}
        self._reserved = False
        self._waited_s = 0.0
        self._keeper: Checkpoints | None = None
        self.saved_step: int | None = None
        self.stall_s = 0.0
        engine, folder = engine_of(run.model), checkpoints_path(config)
        # If the folder exists, another run may write there, which its lock shows.
        needed = config.save_every > 0 or config.resume != "never" or folder.exists()
        needed |= config.memory_every > 0
        if engine.all_ranks.broadcast(bytes([needed])) != b"\0":
            self._keeper = Checkpoints(
                folder,
                run.model,
                run.optimizer,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                memory_every=config.memory_every or None,
            )
            self._keeper.check_when_asked()

    def resume(self, say: Callable[[str], None]) -> Resumed | None:
        """Load the checkpoint to resume from, if the run does; `say` its path and changed keys.

        **Raises** ConfigError if the checkpoint is of another model, CheckpointError if none can
        be used.
        """
        run, choice = self._run, self._run.config.resume
        if self._keeper is None or choice == "never":
            return None
        groups = run.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        started_s = time.perf_counter()
        step = None if choice == "auto" else choice
        with byte_bar("load", None, shown=run.place.rank == 0) as progress:
            loaded = self._keeper.load(step=step, progress=progress)
        if loaded is None:
            return None
        load_s = time.perf_counter() - started_s
        for group, run_settings in zip(groups, settings, strict=True):
            group.update(run_settings)  # this run's keys win over the saved ones
        saved = loaded.extra.get("settings")
        if not isinstance(saved, Mapping):
            raise CheckpointError(
                f"{loaded.path}: it was not saved by `shardwise train`, which keeps its settings "
                "there"
            )
        scale = loaded.extra.get("scaler")
        if run.scaler.is_enabled() and scale:
            run.scaler.load_state_dict(scale)
            window = run.config.loss_scale_window
            if saved.get("loss_scale_window", window) != window:
                run.scaler.set_growth_interval(window)
        if loaded.step is None:
            raise CheckpointError(f"{loaded.path}: it does not say of which step it is")
        lines = find_changes(saved, self._settings, loaded.num_ranks_saved, run.place.world_size)
        where = "a copy in memory" if loaded.from_memory else loaded.path
        say(f"going on from step {loaded.step} ({where})")
        for line in lines:
            say(f"changed since then: {line}")
        return Resumed(
            loaded.step, loaded.from_memory, load_s, loaded.num_bytes, loaded.num_bytes / load_s
        )

    @property
    def failed(self) -> bool:
        """True if the background save failed; `finish` raises its error."""
        return self._saving is not None and self._saving.error is not None

    def after_step(self, step: int, is_last: bool, metrics: JsonLines) -> None:
        """Save, or copy to memory, if the step is due; write the metrics of what has ended.

        **Raises** CheckpointError on all ranks if a save failed.
        """
        keeper, every = self._keeper, self._run.config.save_every
        if not self.failed:
            self._report(metrics)
        memory_every = self._run.config.memory_every
        if keeper is None or not (every or memory_every):
            return
        if not self._reserved and self._run.optimizer.state:
            self.finish(metrics)
            keeper.reserve()
            self._reserved = True
        # A run that is stopped saves to disk: its copies in memory go with it.
        is_stopped = is_last and step < self._run.config.steps
        if (every and (step % every == 0 or is_last)) or is_stopped:
            self._save(keeper, step, metrics)
        elif memory_every and not is_last:
            started_s = time.perf_counter()
            saving = keeper.copy_to_memory(step, extra=self._extra)
            if saving is not None:
                self._report(metrics)
                self._saving = saving
                self.stall_s += time.perf_counter() - started_s

    def finish(self, metrics: JsonLines) -> None:
        """Wait for the save in flight, and write its metrics.

        **Raises** CheckpointError on all ranks if it failed.
        """
        if self._keeper is not None:
            self._keeper.finish()
            self._report(metrics)

    @property
    def _extra(self) -> dict[str, object]:
        return {"settings": self._settings, "scaler": self._run.scaler}

    def _save(self, keeper: Checkpoints, step: int, metrics: JsonLines) -> None:
        started_s = time.perf_counter()
        self.finish(metrics)
        self._waited_s = time.perf_counter() - started_s
        wait = not self._run.config.save_in_background
        started_s = time.perf_counter()
        self._saving = keeper.save(step, extra=self._extra, wait=wait)
        self.stall_s += time.perf_counter() - started_s
        if wait:
            self._report(metrics)

    def _report(self, metrics: JsonLines) -> None:
        saving = self._saving
        if saving is None or not saving.done:
            return
        self._saving = None
        written = saving.wait()
        if saving.in_memory:
            metrics.write(
                step=saving.step, memory_stall_s=saving.stall_s, memory_copy_s=saving.write_s
            )
            return
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
