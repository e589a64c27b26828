"""`Trainer`: the common training loop over N ranks, from a notebook, with exact resume."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, LaunchStoppedError, LaunchTimeoutError, add_note, warn
from nblaunch.machine.arguments import named_arguments
from nblaunch.machine.own_code import users_part
from nblaunch.training import checkpoint
from nblaunch.training.accelerator import Accelerator, move_state
from nblaunch.training.collectives import exchange
from nblaunch.training.distribute import StoppedTogether, distributed, in_place, is_rank, runs_in_place
from nblaunch.training.evaluation import evaluate, forward, in_order, inputs_of, named, predict_part, split
from nblaunch.training.fit_display import FitDisplay
from nblaunch.training.gradients import is_cast, plain_forward
from nblaunch.training.loader import length_of
from nblaunch.training.metrics import Mean, Metric
from nblaunch.training.parallelism import drop_unshared_gradients, is_divided, load_full_state, unwrapped
from nblaunch.training.pytree import batch_size_of, parameters_of
from nblaunch.training.seeding import SEED_VARIABLE, random_states, restore_random_states, seed_everything
from nblaunch.training.step_boundaries import AgreedStop, StepBoundaries
from nblaunch.training.topology import data_world, world
from nblaunch.training.train_config import Data, TrainConfig, check_order, check_training_data, loader_of

if TYPE_CHECKING:
    from nblaunch import LaunchResult

Results = dict[str, float]
HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_end", "on_validation_end", "on_epoch_end", "on_fit_end")


class Callbacks(list[object]):
    def __init__(self, callbacks: Iterable[object]) -> None:
        if not isinstance(callbacks, Iterable):
            raise ArgumentError(f"callbacks={callbacks!r:.80}: must be a list of objects")
        super().__init__(callbacks)
        for callback in self:
            if isinstance(callback, type):
                raise ArgumentError(f"callbacks: {callback.__name__} is a class: pass {callback.__name__}()")
            if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
                raise ArgumentError(f"callbacks: {callback!r:.80} has none of the methods {', '.join(HOOKS)}")

    def have(self, *hooks: str) -> bool:
        return any(hasattr(callback, hook) for callback in self for hook in hooks)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have ``state_dict`` and ``load_state_dict``, by place and class."""
        states = {name: callback.state_dict() for name, callback in self._with_states().items()}
        for name, state in states.items():
            if found := checkpoint.code_in(state):
                raise ArgumentError(
                    f"callbacks: the state_dict() of {name} cannot be saved in a checkpoint: {found}. Use only "
                    "tensors, numbers, strings, lists and dicts"
                )
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._with_states().items():
            if name in states:
                callback.load_state_dict(states[name])

    def _with_states(self) -> dict[str, Any]:
        methods = ("state_dict", "load_state_dict")
        return {
            f"{number} {type(callback).__qualname__}": callback
            for number, callback in enumerate(self)
            if all(callable(getattr(callback, method, None)) for method in methods)
        }

    def call(self, hook: str, *args: Any) -> None:
        for callback in self:
            method = getattr(callback, hook, None)
            if method is not None:
                method(*args)


class SampleWeights:
    """Weighs the losses of one training run, each a mean over its batch.

    DistributedDataParallel averages the ranks' gradients, and accumulation those of batches, so a sample in a small
    batch counts for more. Here a batch of n samples, in a round of N over W ranks, has the weight n W / N. A step of
    rounds of different sizes is divided by its samples at the end. Where all sizes are equal nothing is computed.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.factor = 1.0  # of the loss of the latest batch
        self._first = self._seen = 0
        """Samples of all ranks in the step's first round, and in all of it."""
        self._usual: int | None = None
        """The size of this rank's first batch, if the other ranks' sizes are unknown; 0 once that was said."""

    def begin_batch(self, loader: Any, batch: Any) -> tuple[int, int]:
        """Return the samples of this rank's batch and of all ranks' batches, each counted once.

        Where the loader does not know them all, the other ranks are taken to have as many.
        """
        own, of_all, ranks = loader.own_samples, loader.all_samples, data_world(self._accelerator.copies).size
        if not of_all:
            own = batch_size_of(batch) or 1
            of_all = own * ranks
            if ranks > 1:
                self._warn_if_uneven(own)
        if self._seen == 0:
            self._first = of_all
        self._seen += of_all
        self.factor = own * ranks / self._first
        return own, of_all

    def end_step(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the step's samples, if they are other than its first round implied."""
        expected, seen = self._first * self._accelerator._gradients.divisor, self._seen
        self._seen = 0
        if expected != seen:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(expected / seen)

    def _warn_if_uneven(self, own: int) -> None:
        self._usual = own if self._usual is None else self._usual
        if self._usual and own != self._usual:
            warn(
                f"batches have {self._usual} and {own} samples, and the loader's own sampler hides the other ranks' "
                "sizes, so this step averages batches instead of samples. For exact weights pass the dataset, or a "
                "DataLoader without a distributed sampler"
            )
            self._usual = 0


class Best(NamedTuple):
    step: int
    epoch: int
    value: float
    path: Path | None
    """Its checkpoint, if one is kept."""


def check_setup(path: Path, wrote: Mapping[str, Any], own: Mapping[str, Any], remedy: str) -> None:
    """Refuse to resume from another run's checkpoint.

    Another number of ranks continues if all ranks together have as many samples in each batch as before.
    """
    ranks = int(own["nprocs"]) // int(own["tensor"])
    if wrote["nprocs"] != own["nprocs"] and wrote["batch_size"] is not None and own["batch_size"] is not None:
        samples = int(wrote["batch_size"]) * (int(wrote["nprocs"]) // int(wrote["tensor"]))
        if samples == own["batch_size"] * ranks:
            own = {**own, "nprocs": wrote["nprocs"], "batch_size": wrote["batch_size"]}
        elif samples % ranks == 0:
            remedy = f"batch_size={samples // ranks} for as many samples per step, or {remedy}"
    for name, value in own.items():
        if wrote[name] != value:
            raise ArgumentError(
                f"{path} was written with {name}={wrote[name]}, but this run has {name}={value}: use the same, or "
                f"{remedy}"
            )


def mean_squared_error(output: Any, target: Any) -> Tensor:
    is_float = isinstance(target, Tensor) and isinstance(output, Tensor) and target.is_floating_point()
    if not is_float or output.shape != target.shape:
        raise ArgumentError(
            "loss_fn=None is the mean squared error, which needs float outputs and targets of the same shape, but the "
            f"output is {_kind(output)} and the target {_kind(target)}: pass loss_fn, such as "
            "torch.nn.functional.cross_entropy for classes, or override compute_loss(self, model, batch)"
        )
    return F.mse_loss(output, target)


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def kept_process_state(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Restore afterwards what ranks would not have changed either: all but the trained states.

    These are the random states, and the model's device, types, train and eval modes, forward and gradients.
    """
    random, seed, had_cast = random_states(), os.environ.get(SEED_VARIABLE), is_cast(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    places = {name: (tensor.device, tensor.dtype) for name, tensor in _tensors(model)}
    try:
        model.zero_grad()
        with in_place():
            yield
    finally:
        if not had_cast:
            plain_forward(model)
        for module, is_training in modes:
            module.training = is_training
        model.zero_grad()  # of another device or type than the parameters will have
        for name, tensor in _tensors(model):
            if name in places and places[name] != (tensor.device, tensor.dtype):
                tensor.data = tensor.data.to(*places[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        move_state(optimizer)
        restore_random_states(random)
        os.environ.pop(SEED_VARIABLE, None)
        if seed is not None:
            os.environ[SEED_VARIABLE] = seed


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return chain(model.named_parameters(), model.named_buffers())  # type: ignore[arg-type]  # both are tensors


_ADVICE = (
    "change the samples of train and valid, or override compute_loss(self, model, batch); for metrics it must return "
    "(loss, output, target)"
)


@named_arguments
class Trainer:
    """Trains a module on one or more ranks.

    Args:
        model: The module. After `fit` it has the trained weights, also in the notebook.
        optimizer: An optimizer of the model's parameters. After `fit` it has the trained state.
        config: The settings. Default: ``TrainConfig()``.
        loss_fn: ``(output, target) -> loss``, a mean over the batch. Default: the mean squared error, for outputs and
            targets of the same shape. For classes use, for example, ``torch.nn.functional.cross_entropy``.
        metrics: Metrics by name, computed on the validation data: ``{"accuracy": Accuracy()}``. Default: none.
        callbacks: Objects with any of the methods ``on_fit_begin(trainer)``, ``on_epoch_begin(trainer)``,
            ``on_step_end(trainer, loss)``, ``on_validation_end(trainer, results)``, ``on_epoch_end(trainer, results)``
            and ``on_fit_end(trainer)``. They run on every rank. Setting ``trainer.should_stop`` on any rank ends
            training after the epoch, or after the next validation. Checkpoints hold rank 0's state of each callback
            that has ``state_dict`` and ``load_state_dict``.

    During and after training, `epoch`, `step`, `history`, `validations`, `best` and `accelerator` are current.
    `result` is the `LaunchResult` of the last `fit` that launched ranks, with its metrics and logs; None if the launch
    was stopped or failed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: TrainConfig | None = None,
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        if config is not None and not isinstance(config, TrainConfig):
            raise ArgumentError(f"config={config!r}: must be a TrainConfig")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentError(f"loss_fn={loss_fn!r:.80}: must be a function (output, target) -> loss")
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model={model!r:.80}: must be a torch.nn.Module")
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"optimizer={optimizer!r:.80}: must be a torch.optim.Optimizer of the model")
        if {*map(id, model.parameters())}.isdisjoint(map(id, parameters_of(optimizer))):
            raise ArgumentError("optimizer has none of the model's parameters: create it from model.parameters()")
        self.model = model
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.loss_fn = loss_fn
        self.metrics = named(metrics) if metrics else {}
        self.callbacks = Callbacks(callbacks)
        self.should_stop = False
        self.accelerator = self.config.make_accelerator()
        self.progress = checkpoint.TrainingProgress()
        self.loaded: checkpoint.Loaded | None = None
        self.result: LaunchResult | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "result": None}  # with all its logs and metrics

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.progress.epoch

    @property
    def step(self) -> int:
        """Number of optimizer steps so far, over all epochs."""
        return self.progress.step

    @property
    def history(self) -> list[Results]:
        """The results of each finished epoch, as rows for ``pandas.DataFrame(trainer.history)``.

        Each is ``{"epoch", "step", "loss", "seconds"}``, with validation also ``"valid_loss"`` and
        ``"valid_<metric>"`` (NaN in an epoch without a validation). `step` counts the optimizer steps so far; `loss` is
        the mean over the epoch's samples. A run that ends within an epoch has a row for that part. A resumed run
        includes the epochs before. After a failure the rows end at the latest checkpoint; if the run wrote none, they
        are unchanged, like the weights.
        """
        return self.progress.history

    @property
    def validations(self) -> list[Results]:
        """The results of each validation: ``{"epoch", "step", "valid_loss", "valid_<metric>"}``."""
        return self.progress.validations

    @property
    def best(self) -> Best | None:
        """The best step by ``config.monitor``; None before the first validation or epoch."""
        progress, folder = self.progress, self.checkpoint_folder()
        if not progress.best_step:
            return None
        value = -progress.best if self.config.higher_is_better else progress.best
        path = folder.best if folder is not None and folder.best.exists() else None
        return Best(progress.best_step, progress.best_epoch, value, path)

    # ------------------------------------------------------------------ to override
    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Any, ...]:
        """Return the mean loss of a batch. Override it for a loss of your own.

        For metrics return ``(loss, output)``, or ``(loss, output, target)`` unless batches are ``(inputs, target)``, or
        dicts with the target under ``labels``, ``label`` or ``target``.
        """
        output, target = forward(model, batch, _ADVICE)
        return (self.loss_fn or mean_squared_error)(output, target), output, target

    def predict_batch(self, model: nn.Module, batch: Any) -> Any:
        """Return the outputs for a batch: a pytree of tensors with the samples in dimension 0.

        The default calls the model with the batch's inputs: a tensor, ``(inputs,)``, ``(inputs, target)``, or a dict,
        without its target.
        """
        inputs = inputs_of(batch)
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    # ------------------------------------------------------------------ training
    @named_arguments
    def fit(self, train: Data, valid: Data | None = None) -> tuple[nn.Module, Optimizer]:
        """Train, and return the model and the optimizer in their trained states; `history` has the results.

        In a notebook this launches ``config.nprocs`` ranks; with ``nprocs=1`` it trains in the notebook's own process.
        In a rank, or under torchrun or srun, it trains as that rank.
        After a stop the model, the optimizer and `history` have the state after the last complete step.
        With a ``checkpoint_dir``, call `fit` again with the same arguments to resume after a stop or a failure. The
        resumed run takes the same steps as an uninterrupted one, bit-identical on the CPU with one or two ranks. (The
        dataset's own random generators are not restored.)

        Args:
            train: A dataset, shuffled in batches of ``config.batch_size`` per rank; or a DataLoader with its own
                settings. An IterableDataset needs no length, but a schedule then needs ``config.max_steps``.
            valid: The validation data, likewise, not shuffled. Every sample counts once. Default: none.

        Returns:
            `model` and `optimizer`, the same objects.

        Raises:
            ArgumentError: ``config.monitor`` is not among the results, or the latest checkpoint is of another run.
            KeyboardInterrupt: The run was interrupted; `LaunchStoppedError` if it was stopped otherwise. A note on the
                exception says where the next `fit` starts.
            Exception: A rank's exception, as from `notebook_launcher`.
        """
        __tracebackhide__ = True  # IPython leaves this frame out
        check_training_data(train, valid, self.config)
        if not self.callbacks.have("on_epoch_end", "on_validation_end"):  # which may add results
            of_valid = [] if valid is None else self.validation_names()
            self.config.check_monitor(["step", "loss", "seconds", *of_valid])
        if is_rank():
            self._fit(train, valid)
        elif runs_in_place(self.accelerator, self.config.launch_options):
            try:
                with kept_process_state(self.model, self.optimizer):
                    self._fit(train, valid)
            except KeyboardInterrupt as error:
                is_whole = isinstance(error, StoppedTogether)
                stopped = KeyboardInterrupt() if is_whole else error.with_traceback(users_part(error.__traceback__))
                add_note(stopped, self._what_is_next(self.progress))
                raise stopped from None
        else:
            before, self.result = self._checkpoints(), None
            try:
                self.result = self._distributed(self._fit, "Trainer.fit")(train, valid)
            except BaseException as error:
                self._take_what_is_left(error, before)
                raise
            self.progress = self.result[0]
        self.loaded = None
        return self.model, self.optimizer

    def _take_what_is_left(self, error: BaseException, before: list[tuple[Path, int]]) -> None:
        """Take the progress of a stopped or failed run, and say what the next `fit` begins with."""
        now, trained = self._checkpoints(), getattr(error, "results", {}).get(0)
        if now != before:
            try:
                state = checkpoint.read(now[-1][0], mmap=True)
            except (ArgumentError, RuntimeError) as unreadable:  # must not hide the error that ended the run
                add_note(error, str(unreadable))
                return
            self.progress, self.loaded = checkpoint.TrainingProgress(**state["progress"]), None
        elif isinstance(trained, checkpoint.TrainingProgress):
            self.progress = trained
        if now != before or isinstance(error, (KeyboardInterrupt, LaunchStoppedError, LaunchTimeoutError)):
            add_note(error, self._what_is_next(trained))

    def _what_is_next(self, trained: Any) -> str:
        """Return what the next `fit` begins with after a stop. Ranks that could not return it have no progress."""
        config, found = self.config, [path for path, _ in self._checkpoints()]
        if self.loaded is not None and self.loaded.is_continued:
            return f"the next fit resumes after step {self.loaded.step}, from {self.loaded.path}"
        if found and config.resume:
            return f"the next fit resumes after step {checkpoint.step_of(found[-1])}, from {found[-1]}"
        remedy = "a checkpoint_dir" if config.checkpoint_dir is None else "" if config.resume else "resume=True"
        if isinstance(trained, checkpoint.TrainingProgress):
            would = f"; with {remedy} it would resume this run" if remedy else ""
            return (
                f"the model, the optimizer and history have the state after step {trained.step}. The next fit starts a "
                f"new run from it{would}"
            )
        if not remedy:
            return "the ranks were stopped before the first checkpoint: the next fit starts at step 0"
        return f"the trained state is lost; with {remedy} the next fit would resume this run"

    def _fit(self, train: Data, valid: Data | None) -> checkpoint.TrainingProgress:
        TrainingRun(self, train, valid).run()
        return self.progress

    def checked_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """Return (loss, output, target) by `compute_loss`, with None for what it leaves out."""
        computed: Any = self.compute_loss(model, batch)
        loss, output, target = (*computed, None, None)[:3] if isinstance(computed, tuple) else (computed, None, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(f"compute_loss returned {_kind(loss)}: return a one-element tensor, or (loss, output)")
        return loss, output, target

    # ------------------------------------------------------------------ validation and prediction
    def validate(self, data: Data) -> Results:
        """Return ``valid_loss`` and ``valid_<metric>`` over the data, every sample counted once.

        Like `fit`, it launches ranks in a notebook, and in a rank it runs as that rank. All ranks get the same results.
        """
        results: Results = self._in_ranks(self._validate_part, data, "Trainer.validate")[0]
        return results

    def _validate_part(self, data: Data) -> Results:
        return self.validate_prepared(self._placed_model(), data)

    def validation_names(self) -> list[str]:
        """Return the names of the results of a validation, without those that callbacks add."""
        return ["valid_loss", *(f"valid_{name}" for name in self.metrics)]

    def validate_prepared(
        self, model: nn.Module, data: Data, at: int | None = None, on_batch: Callable[[], None] | None = None
    ) -> Results:
        """Validate a prepared model in this rank, and report at step `at`. A collective.

        `on_batch` is called before each batch if all ranks have equally many.
        """
        loader = loader_of(data, self.config, shuffle=False, accelerator=self.accelerator)
        is_called = on_batch is not None and (is_divided(model) or loader.own_sampler_size() is None)

        latest = torch.zeros(())

        def step(model: nn.Module, batch: Any) -> tuple[Any, Any]:
            nonlocal latest
            if on_batch is not None and is_called:
                on_batch()
            latest, output, target = self.checked_loss(model, batch)
            if self.metrics and target is None:
                target = split(batch, _ADVICE)[1]
            if self.metrics and output is None:
                raise ArgumentError("metrics need the output: return (loss, output) from compute_loss")
            return output, target

        return evaluate(
            model,
            loader,
            step=step,
            loss_fn=lambda output, target: latest,
            metrics=self.metrics,
            prefix="valid_",
            at=at,
        )

    def predict(self, data: Data) -> Any:
        """Return the model's output for every sample, in the order of the data, on the CPU.

        In a notebook it launches ranks; in a rank, every rank gets all outputs. The model runs in eval mode without
        gradients; targets are ignored. Override `predict_batch` for other outputs. They are briefly in memory twice.

        Args:
            data: A dataset, or a DataLoader that does not shuffle.

        Returns:
            The results of `predict_batch`, concatenated along dimension 0.

        Raises:
            ArgumentError: The loader shuffles or has a distributed sampler, or an output does not have the samples in
                dimension 0.
            RuntimeError: The outputs of two batches have different shapes per sample.
        """
        check_order(data)
        return in_order(self._in_ranks(self._predict_part, data, "Trainer.predict"))

    def _predict_part(self, data: Data) -> list[Any]:
        loader = loader_of(data, self.config, shuffle=False, accelerator=self.accelerator)
        return predict_part(self._placed_model(), loader, self.predict_batch, self.accelerator.device)

    def _placed_model(self) -> nn.Module:
        return unwrapped(self.accelerator._preparation().module(self.model, evaluates=True))

    def _in_ranks(self, function: Callable[[Data], Any], data: Data, name: str) -> list[Any]:
        if is_rank():
            return exchange(function(data))
        if runs_in_place(self.accelerator, self.config.launch_options):
            with kept_process_state(self.model, self.optimizer):
                return [function(data)]
        return list(self._distributed(function, name, trains=False)(data))

    def _distributed(self, function: Callable[..., Any], name: str, trains: bool = True) -> Callable[..., Any]:
        return distributed(self.accelerator, function, self.config.launch_options, name=name, trains=trains)

    # ------------------------------------------------------------------ checkpoints
    def load(self, path: str | os.PathLike[str], *, progress: bool = True) -> None:
        """Load a checkpoint into the model and the optimizer.

        Args:
            path: A checkpoint written by `fit`, or a folder, whose latest checkpoint is loaded.
            progress: True: also load `epoch`, `step`, `history` and `best`. The next `fit` resumes that run, and needs
                the same settings. False: load only the model and the optimizer. The next `fit` starts a new run; if
                its `checkpoint_dir` has checkpoints, it needs ``resume=False`` to replace them.

        Raises:
            ArgumentError: There is no checkpoint, or `fit` did not write the file.
            RuntimeError: The file is damaged, or does not fit the model.
        """
        file = Path(path)
        if file.is_dir():
            found = checkpoint.find(file)
            if not found:
                raise ArgumentError(f"path={str(path)!r}: the folder has no checkpoint (step-N.pt)")
            file = found[-1]
        if not file.is_file():
            raise ArgumentError(f"path={str(path)!r}: no such file or folder")
        own = self._load_states(file)
        self.loaded = checkpoint.Loaded(file.absolute(), own.step, is_continued=progress)
        if progress:
            self.progress = own

    def restore_best(self) -> Best:
        """Load the model and the optimizer of the best step, and return `best`. The next `fit` is not affected.

        Raises:
            ArgumentError: No best checkpoint was kept.
        """
        folder = self.checkpoint_folder()
        if folder is None or not folder.best.exists():
            where = "checkpoint_dir=None" if folder is None else f"checkpoint_dir={str(folder.path)!r}"
            raise ArgumentError(
                f"{where}: there is no best checkpoint: use TrainConfig(checkpoint_dir=..., restore_best=True). No "
                "step is the best if the monitored result was never finite"
            )
        own = self._load_states(folder.best)
        progress = self.progress
        progress.best, progress.best_step, progress.best_epoch = own.best, own.best_step, own.best_epoch
        assert self.best is not None
        return self.best

    def _load_states(self, path: Path) -> checkpoint.TrainingProgress:
        state: Any = checkpoint.read(path, mmap=is_divided(self.model))
        if not isinstance(state, Mapping) or "progress" not in state:
            raise ArgumentError(
                f"path={str(path)!r}: not a checkpoint written by fit. For a model's state dict use "
                "model.load_state_dict(torch.load(path))"
            )
        load_full_state(unwrapped(self.model), state["model"][0])
        load_full_state(self.optimizer, state["optimizer"][0])
        return checkpoint.TrainingProgress(**state["progress"])

    def checkpoint_folder(self) -> checkpoint.CheckpointFolder | None:
        """Return the folder of `config`."""
        folder = self.config.checkpoint_dir
        return None if folder is None else checkpoint.CheckpointFolder(folder, self.config.save_total_limit)

    def _checkpoints(self) -> list[tuple[Path, int]]:
        folder = self.checkpoint_folder()
        return [] if folder is None else [(path, path.stat().st_mtime_ns) for path in checkpoint.find(folder.path)]


# ------------------------------------------------------------------ in each rank
class TrainingRun:
    """One `Trainer.fit` in one rank. All ranks make it and run it alike."""

    def __init__(self, trainer: Trainer, train: Data, valid: Data | None) -> None:
        config = self.config = trainer.config
        seed_everything(config.seed)
        torch.manual_seed(config.seed + world().rank)  # dropout differs between ranks, the order of data does not
        self.trainer, self.valid = trainer, valid
        self._monitor = config.monitor or ("loss" if valid is None else "valid_loss")
        self._monitored = f"{'highest' if config.higher_is_better else 'lowest'} {self._monitor}"
        self.accelerator = trainer.accelerator = config.make_accelerator()
        self.progress = trainer.progress = checkpoint.TrainingProgress(monitored=self._monitored)
        trainer.should_stop = self._is_stopped = False
        trainer.optimizer.zero_grad()  # an interrupted run in this process may have left gradients
        drop_unshared_gradients(trainer.model)
        loader = loader_of(train, config, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(trainer.model, trainer.optimizer, loader)
        self._mean_loss = Mean()
        self._folder, self._open = trainer.checkpoint_folder(), ExitStack()
        if self._folder is not None:
            self._open.callback(self._folder.close)
        self._is_best = False  # and not saved as such yet
        self._written = (0, "")  # the step of the latest checkpoint, and what was due then
        self._pending: list[tuple[Tensor, int, int]] = []
        """Losses that are not yet in the mean, with samples and step; reading one waits for the GPU."""
        self._unreported: Tensor | None = None  # the loss of the last step, until it is reported
        self._weights = SampleWeights(self.accelerator)
        self._is_whole, self._taken = True, 0
        """Whether no step is half done; and the batches of the pass that were trained on."""
        self._boundaries = StepBoundaries(exchange(uuid.uuid4().hex)[0])
        self._steps = config.count_steps(length_of(self.loader))
        self.progress.schedule_end = self._steps or 0
        made = config.make_scheduler(trainer.optimizer, self.progress.schedule_end)
        self._scheduler = self.accelerator.prepare(made)
        self.accelerator.register_for_checkpointing(trainer.callbacks)
        try:
            self._resume()
        except BaseException:
            self._open.close()
            raise
        self._display = FitDisplay(self._steps, self.progress.step)
        self._display.report_again(self.progress.history, self.progress.validations)
        if self.progress.best_step:
            self._mark_best()
        self._restart_clock()

    def run(self) -> None:
        trainer = self.trainer
        trainer.callbacks.call("on_fit_begin", trainer)
        with self._open, closing(self._display), self._boundaries:
            try:
                self._end_what_is_due()
                while not self._is_done():
                    self._train_epoch()
                    self._boundaries.reach()
            except AgreedStop:
                self._write_stopped()
                raise StoppedTogether(self.progress) from None
            except BaseException as error:
                if self._boundaries.is_asked and self._is_between_steps() and not world().is_shared:
                    self._write_stopped()
                    if isinstance(error, Exception):  # a worker that loads has got the interrupt too
                        raise KeyboardInterrupt from error
                raise
        if self.config.restore_best and self.progress.best_step:
            trainer.restore_best()
        elif self.config.restore_best and self.accelerator.is_main_process:
            warn(f"restore_best=True: {self._monitor} was never finite, so the last step's weights are kept")
        trainer.callbacks.call("on_fit_end", trainer)
        if self._boundaries.is_asked:  # too late to end anything
            raise StoppedTogether(self.progress)

    def _is_done(self) -> bool:
        config, progress = self.config, self.progress
        has_epochs = config.epochs is not None and progress.epoch >= config.epochs
        return progress.ended or self._is_stopped or has_epochs or self._has_steps()

    def _has_steps(self) -> bool:
        return self.config.max_steps is not None and self.progress.step >= self.config.max_steps

    # ------------------------------------------------------------------ an epoch
    def _is_between_steps(self) -> bool:
        """Return True if all batches that were loaded were trained on, in whole steps."""
        return self._is_whole and (self.progress.due == "epoch" or self.loader.state_dict()["batches"] == self._taken)

    def _end_what_is_due(self) -> None:
        """Do what an interrupted run has left undone after the step that this one continues from."""
        due, self._epoch_begin = self.progress.due, time.monotonic() - self.progress.seconds
        if due == "step":
            self._settle_step()
            due = "run"
        if due == "epoch" or (due == "run" and self._is_done()):
            self._drop_part_of_epoch()
            self._end_epoch(is_whole=due == "epoch")
        self.progress.due = ""

    def _train_epoch(self) -> None:
        trainer, progress = self.trainer, self.progress
        self._drop_part_of_epoch()
        self._taken = self.loader.state_dict()["batches"]
        self._epoch_begin = time.monotonic() - progress.seconds
        trainer.callbacks.call("on_epoch_begin", trainer)
        self.model.train()
        of_all = "" if self.config.epochs is None else f"/{self.config.epochs}"
        has_batches = is_broken_off = False
        with closing(self._display.batches(self.loader, f"epoch {progress.epoch + 1}{of_all}")) as batches:
            for batch in batches:
                has_batches = True
                with self.accelerator.accumulate(self.model):
                    loss = self._train_batch(batch)
                if self.accelerator.sync_gradients:
                    self._end_step(loss)
                    if not (self.loader.is_last or self._is_done()):
                        self._boundaries.reach()
                if self._is_done() and not self.loader.is_last:  # else the pass ends by itself
                    is_broken_off = True
                    break
        if not has_batches:
            raise ArgumentError(
                f"train yielded no batch in epoch {progress.epoch + 1}: a dataset needs at least one sample, and an "
                "IterableDataset must start over with each iter()"
            )
        self._end_epoch(is_whole=not is_broken_off)

    def _drop_part_of_epoch(self) -> None:
        """Remove the results of the part of this epoch that an earlier end of the run has left."""
        progress = self.progress
        if progress.history and progress.history[-1]["epoch"] == progress.epoch:
            progress.history.pop()

    def _train_batch(self, batch: Any) -> Tensor:
        self._is_whole = False
        self._taken += 1
        loss, *_ = self.trainer.checked_loss(self.model, batch)
        own, of_all = self._weights.begin_batch(self.loader, batch)
        self._samples += of_all
        self._pending.append((loss.detach(), own, self.progress.step + 1))
        self.accelerator.backward(loss * self._weights.factor if self._weights.factor != 1.0 else loss)
        if self.accelerator.sync_gradients:
            self._weights.end_step(self.trainer.optimizer)
        if self.config.max_grad_norm is not None:  # of those that are zeroed below: others would accumulate in the norm
            self.accelerator.clip_grad_norm_(parameters_of(self.trainer.optimizer), self.config.max_grad_norm)
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _end_step(self, loss: Tensor) -> None:
        """Count and report the step; the last one of an epoch or run is left to its end."""
        trainer, config, progress = self.trainer, self.config, self.progress
        progress.step += 1
        is_last = self.loader.is_last
        progress.due, self._is_whole = "epoch" if is_last else "run" if self._has_steps() else "step", True
        trainer.callbacks.call("on_step_end", trainer, loss)
        self._display.step(progress.step)
        self._unreported = loss
        if progress.step % config.log_every == 0 or progress.step == self._display.first_step:
            self._report(loss)
        if progress.due == "step":
            self._settle_step()

    def _settle_step(self) -> None:
        config, progress = self.config, self.progress
        if self.valid is not None and config.validate_every is not None and progress.step % config.validate_every == 0:
            self._validate(self.valid)
        is_latest = config.checkpoint_every is not None and progress.step % config.checkpoint_every == 0
        progress.due = "run" if progress.ended or self._is_stopped else ""
        if (is_latest or self._is_best) and not progress.due:
            self._add_losses()
            progress.seconds = time.monotonic() - self._epoch_begin
            self._write_checkpoint(is_latest)

    def _report(self, loss: Tensor) -> None:
        values = {"loss": float(loss)}
        if self.accelerator.is_main_process:  # the same on every rank
            values["lr"] = self.trainer.optimizer.param_groups[0]["lr"]
            if self._samples and self.progress.step != self._display.first_step:  # the first one also starts workers
                values["samples_per_second"] = self._samples / max(1e-9, time.monotonic() - self._clock)
        self._display.report(self.progress.step, **values)
        self._add_losses()
        self._unreported = None
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._clock, self._samples = time.monotonic(), 0

    def _add_losses(self) -> None:
        for loss, size, step in self._pending:
            self._mean_loss.update(self._display.checked_loss(step, float(loss)), size)
        self._pending.clear()

    def _end_epoch(self, is_whole: bool) -> None:
        """Add the epoch's results to the history, and save; a later run may continue one that is not whole."""
        trainer, config, progress = self.trainer, self.config, self.progress
        self._add_losses()
        results = {"epoch": float(progress.epoch), "step": float(progress.step), "loss": self._mean_loss.compute()}
        validation = {} if self.valid is None else self._validation_at_end(self.valid, is_whole)
        results |= validation
        results["seconds"] = time.monotonic() - self._epoch_begin
        if self.accelerator.is_main_process:
            self._display.report(progress.step, epoch_loss=results["loss"])
        progress.history.append(results)
        trainer.callbacks.call("on_epoch_end", trainer, results)
        results.update(checkpoint.as_numbers(results))
        if self.valid is None or config.validate_every is None or progress.validations:
            config.check_monitor([*results, *(progress.validations[-1] if progress.validations else ())])
        self._judge({name: value for name, value in results.items() if name not in validation})
        progress.seconds, progress.due = results["seconds"], ""
        if is_whole:
            progress.epoch, progress.seconds, self._taken = progress.epoch + 1, 0.0, 0
            self._mean_loss.reset()
        if self._unreported is not None and self._is_done():
            self._report(self._unreported)
        self._write_checkpoint()

    # ------------------------------------------------------------------ validation
    def _validation_at_end(self, valid: Data, is_whole: bool) -> Results:
        """Return the results of validation at the end of an epoch or of the run, if it is due there."""
        config, progress = self.config, self.progress
        if progress.validations and progress.validations[-1]["step"] == progress.step:
            return {name: value for name, value in progress.validations[-1].items() if name not in ("epoch", "step")}
        is_end = not is_whole or self._has_steps() or progress.epoch + 1 == config.epochs
        if is_end or config.validate_every is None or progress.step % config.validate_every == 0:
            return self._validate(valid)
        names = [*progress.validations[-1]][2:] if progress.validations else self.trainer.validation_names()
        return dict.fromkeys(names, math.nan)  # every epoch has the same results

    def _validate(self, valid: Data) -> Results:
        trainer, progress = self.trainer, self.progress
        results = trainer.validate_prepared(self.model, valid, progress.step, self._boundaries.reach)
        self._display.note(progress.step, results)
        trainer.callbacks.call("on_validation_end", trainer, results)
        results = checkpoint.as_numbers(results)
        progress.validations.append({"epoch": float(progress.epoch), "step": float(progress.step), **results})
        self._judge(results)
        self._restart_clock()
        return results

    def _judge(self, results: Results) -> None:
        """Compare a validation or an epoch with the best so far; end training if a rank requires it. A collective.

        Rank 0's value decides: with a callback's results each rank may have another.
        """
        config, progress, name = self.config, self.progress, self._monitor
        by_rank = exchange((self.trainer.should_stop, results.get(name)))
        value = by_rank[0][1]
        is_best = value is not None and progress.monitor(-value if config.higher_is_better else value)
        is_stale = config.early_stop is not None and progress.stale >= config.early_stop
        progress.ended |= is_stale
        self._is_stopped |= any(stops for stops, _ in by_rank)  # this run only: `fit` may continue
        if is_best:
            self._is_best = True
            self._mark_best()

    def _mark_best(self) -> None:
        progress = self.progress
        value = -progress.best if self.config.higher_is_better else progress.best
        self._display.mark_best(self._monitor, progress.best_step, value)

    # ------------------------------------------------------------------ checkpoints
    def _write_checkpoint(self, is_latest: bool = True, *, may_fail: bool = False) -> None:
        """Save what every rank needs to resume here. All ranks call it."""
        progress, is_best = self.progress, self._is_best and self.config.keeps_best
        self._is_best = False
        if self._folder is None or not (is_latest or is_best):
            return
        self._boundaries.is_saving = True
        failure, state = "", self.accelerator._states.collect()
        losses = exchange(self._mean_loss.state_dict())
        if self.accelerator.is_main_process:
            state.update(setup=self._setup(), progress=asdict(progress), losses=losses)
            try:
                self._folder.write(state, progress.step, is_latest=is_latest, is_best=is_best)
            except OSError as error:
                if not may_fail:
                    raise
                failure = str(error)
                warn(f"the checkpoint of step {progress.step} could not be written: {failure}", each_time=True)
        if not exchange(failure)[0]:
            if is_latest:
                self.trainer.loaded = None  # after an interrupt the next run continues this checkpoint
                self._written = progress.step, progress.due
            self._restart_clock()
        self._boundaries.is_saving = False

    def _write_stopped(self) -> None:
        """Save where an interrupted run has ended, unless that was done already."""
        progress = self.progress
        if progress.step and (progress.step, progress.due) != self._written:
            self._add_losses()
            if self._unreported is not None:
                self._report(self._unreported)
            progress.seconds = time.monotonic() - self._epoch_begin
            self._write_checkpoint(may_fail=True)  # what was trained comes back all the same

    def _setup(self) -> dict[str, Any]:
        """Return what must be the same to resume a run: it determines the samples of each step."""
        return {
            "nprocs": world().size,
            "batch_size": self.loader.batch_size,
            "optimizer": type(self.trainer.optimizer).__name__,
            "tensor": self.accelerator.copies,
            **self.config.fixed_on_resume(),
            "samples": self.loader.total,
            "batches": length_of(self.loader),
        }

    def _find(self) -> tuple[Path | None, int]:
        """Return the checkpoint to resume from, and the step of this run's best one, 0 for none. A collective."""
        folder, loaded = self._folder, self.trainer.loaded
        found, best = None, 0
        if folder is not None and self.accelerator.is_main_process:
            resumes, until = self.config.resume, math.inf
            if loaded is not None and loaded.is_continued:
                resumes, until = loaded.path.parent == folder.path.absolute(), loaded.step
            found = folder.begin(resumes, until)
            if resumes and folder.best.exists():
                best = checkpoint.read(folder.best, mmap=True)["progress"]["best_step"]
        found, best = exchange((found, best))[0]
        if found is not None and loaded is not None and not loaded.is_continued:
            raise ArgumentError(
                f"checkpoint_dir={str(found.parent)!r} has checkpoints, and fit would resume from them instead of the "
                f"weights of {loaded.path}: use resume=False to replace them, or another checkpoint_dir"
            )
        return (loaded.path if loaded is not None and loaded.is_continued else found), best

    def _resume(self) -> None:
        """Resume from the checkpoint that was loaded, else from the latest one if the config says so."""
        path, best = self._find()
        if path is None:
            return
        config, trainer, steps = self.config, self.trainer, self.progress.schedule_end
        state = checkpoint.read(path, mmap=is_divided(trainer.model))
        remedy = "another checkpoint_dir or resume=False to train from the start"
        if trainer.loaded is not None:
            remedy = "trainer.load(path, progress=False) to start a new run from its weights"
        check_setup(path, state["setup"], self._setup(), remedy)
        progress = self.progress = trainer.progress = checkpoint.TrainingProgress(**state["progress"])
        is_kept = not config.keeps_best or 0 < best == progress.best_step  # else the file is another run's, or missing
        if not is_kept or progress.monitored != self._monitored:
            progress.best, progress.best_step = math.inf, 0
        progress.monitored = self._monitored
        if self.accelerator.is_main_process:
            checkpoint.compare_rates(path, state, trainer.optimizer)
            if self._is_done() and not progress.due:
                warn(
                    f"nothing is left to train: {path} is at epoch {progress.epoch} and step {progress.step}. Set more "
                    "epochs or max_steps, resume=False to train from the start, or another checkpoint_dir"
                )
        before, progress.schedule_end = progress.schedule_end, steps
        try:
            self.accelerator._states.restore(state, str(path))
        except ArgumentError as error:
            raise ArgumentError(f"{error}. Use the same, or {remedy}") from error
        for saved in state["losses"] if self.accelerator.is_main_process else ():
            self._mean_loss.add_state_dict(saved)
        if isinstance(config.schedule, str) and 0 < before < steps:
            self._stretch_schedule(path)

    def _stretch_schedule(self, path: Path) -> None:
        groups, scheduler = self.trainer.optimizer.param_groups, self._scheduler
        before = groups[0]["lr"]
        for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * factor(scheduler.last_epoch)
        now = groups[0]["lr"]
        if now != before and self.accelerator.is_main_process:
            warn(
                f"{path} was written by a run of fewer steps: the {self.config.schedule} schedule is stretched to "
                f"{self.progress.schedule_end} steps, so the learning rate jumps from {before:.3g} to {now:.3g}. For a "
                "new schedule, start a new run from these weights: trainer.load(path, progress=False)"
            )
