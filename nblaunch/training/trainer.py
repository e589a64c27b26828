"""`Trainer`: the common training loop over N ranks, from a notebook, with exact resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, LaunchStoppedError, LaunchTimeoutError, add_note
from nblaunch.machine.arguments import named_arguments
from nblaunch.machine.own_code import users_part
from nblaunch.training import checkpoint
from nblaunch.training.accelerator import move_state
from nblaunch.training.collectives import exchange
from nblaunch.training.distribute import StoppedTogether, distributed, in_place, is_rank, runs_in_place
from nblaunch.training.evaluation import (
    evaluate,
    forward,
    in_order,
    inputs_of,
    named,
    predict_part,
    split,
)
from nblaunch.training.gradients import is_cast, plain_forward
from nblaunch.training.metrics import Metric
from nblaunch.training.parallelism import is_divided, load_full_state, unwrapped
from nblaunch.training.pytree import parameters_of
from nblaunch.training.seeding import SEED_VARIABLE, random_states, restore_random_states
from nblaunch.training.train_config import Data, TrainConfig, check_order, check_training_data, loader_of
from nblaunch.training.training_run import Best, Callbacks, Results, TrainingRun


def mean_squared_error(output: Any, target: Any) -> Tensor:
    is_float = isinstance(target, Tensor) and isinstance(output, Tensor) and target.is_floating_point()
    if not is_float or output.shape != target.shape:
        raise ArgumentError(
            "loss_fn=None is the mean squared error, which needs outputs and targets of floats in the same shape, and "
            f"the output is {_kind(output)}, the target {_kind(target)}: give loss_fn, such as "
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


if TYPE_CHECKING:
    from nblaunch import LaunchResult


_ADVICE = (
    "let the data of fit (train, valid) have such samples, or override compute_loss(self, model, batch); for metrics "
    "let it return (loss, output, target)"
)


@named_arguments
class Trainer:
    """Trains a module over several ranks.

    Args:
        model: The module. After `fit` it holds the trained weights, in the notebook too.
        optimizer: Over the model's parameters; its state comes back too.
        config: The settings. Default: ``TrainConfig()``.
        loss_fn: ``(output, target) -> loss``, a mean over the batch. Default: the mean squared error, for outputs and
            targets of the same shape; for classes give another, such as ``torch.nn.functional.cross_entropy``.
        metrics: By name, computed over the validation data: ``{"accuracy": Accuracy()}``. Default: none.
        callbacks: Objects with any of the methods ``on_fit_begin(trainer)``, ``on_epoch_begin(trainer)``,
            ``on_step_end(trainer, loss)``, ``on_validation_end(trainer, results)``, ``on_epoch_end(trainer, results)``
            and ``on_fit_end(trainer)``. They run in every rank. Setting ``trainer.should_stop`` on any rank ends
            training with the epoch, or with the next validation. Checkpoints hold rank 0's states of those that have
            ``state_dict`` and ``load_state_dict``.

    For callbacks and afterwards: `epoch`, `step` (optimizer steps done), `history`, `validations`, `best` and
    `accelerator`, current during training. `result` is the `LaunchResult` of the last `fit` that launched ranks, with
    its metrics and logs; None if that was stopped or failed.
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
            raise ArgumentError(f"config={config!r}: use a TrainConfig")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentError(f"loss_fn={loss_fn!r:.80}: give a function (output, target) -> loss")
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model={model!r:.80}: give a torch.nn.Module")
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"optimizer={optimizer!r:.80}: give a torch.optim.Optimizer of the model's parameters")
        if {*map(id, model.parameters())}.isdisjoint(map(id, parameters_of(optimizer))):
            raise ArgumentError("optimizer: it has none of the model's parameters: make it of model.parameters()")
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
        """The epoch in training, from 0."""
        return self.progress.epoch

    @property
    def step(self) -> int:
        """Optimizer steps done, over all epochs."""
        return self.progress.step

    @property
    def history(self) -> list[Results]:
        """The results of each finished epoch.

        Each is ``{"epoch", "step", "loss", "seconds"}``, with validation also ``"valid_loss"`` and
        ``"valid_<metric>"``: NaN in an epoch that has ended without one, so that every row has them, and
        ``pandas.DataFrame(trainer.history)`` is a whole table. `step` counts the optimizer steps so far; `loss` is the
        mean over the epoch's samples. A run that ends within an epoch has an entry for that part. A resumed run has the
        epochs before, too. After ranks have failed these are the epochs up to the latest checkpoint; if the run wrote
        none, they are the former run's, as the weights are.
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
        """Return the loss of a batch, a mean over its samples. Override it freely.

        Metrics need more: return ``(loss, output)``, or ``(loss, output, target)`` for batches of another form than
        the default: ``(inputs, target)``, or a dict with the target under ``labels``, ``label`` or ``target``.
        """
        output, target = forward(model, batch, _ADVICE)
        return (self.loss_fn or mean_squared_error)(output, target), output, target

    def predict_batch(self, model: nn.Module, batch: Any) -> Any:
        """Return the outputs for a batch: a pytree of tensors whose first dimension is the samples.

        The default calls the model with the batch's inputs: a tensor, ``(inputs,)``, ``(inputs, target)``, or a dict,
        without its target.
        """
        inputs = inputs_of(batch)
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    # ------------------------------------------------------------------ training
    @named_arguments
    def fit(self, train: Data, valid: Data | None = None) -> tuple[nn.Module, Optimizer]:
        """Train, and return the model and the optimizer, which hold the trained states; `history` has the results.

        In a notebook this launches ``config.nprocs`` ranks. With ``nprocs=1`` it trains in the notebook's own process.
        In a rank, or under torchrun or srun, it trains as one of the ranks.
        After a stop the model, the optimizer and `history` have what was trained, in whole steps.
        With a ``checkpoint_dir`` an unfinished run resumes: after a stop or a failure, call `fit` again with the same
        arguments, and it takes the same steps as an uninterrupted run (on the CPU with one or two ranks bit for bit;
        random generators of the dataset's own are not resumed).

        Args:
            train: A dataset, shuffled in batches of ``config.batch_size`` per rank; or a DataLoader, used as it is. An
                IterableDataset needs no length; a schedule then needs ``config.max_steps``.
            valid: The same for validation, in order. Every sample counts once. Default: none.

        Returns:
            `model` and `optimizer`, the same objects.

        Raises:
            ArgumentError: ``config.monitor`` is not among the results, or the latest checkpoint is of another run.
            KeyboardInterrupt: The run was interrupted; `LaunchStoppedError` if it was stopped otherwise. A note on the
                error says what the next `fit` begins with.
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
            state = checkpoint.read(now[-1][0], mmap=True)
            self.progress, self.loaded = checkpoint.TrainingProgress(**state["progress"]), None
        elif isinstance(trained, checkpoint.TrainingProgress):
            self.progress = trained
        if now != before or isinstance(error, (KeyboardInterrupt, LaunchStoppedError, LaunchTimeoutError)):
            add_note(error, self._what_is_next(trained))

    def _what_is_next(self, trained: Any) -> str:
        """Return what the next `fit` begins with after a stop. Ranks that could not return it have no progress."""
        config, found = self.config, [path for path, _ in self._checkpoints()]
        if self.loaded is not None and self.loaded.is_continued:
            return f"the next fit continues after step {self.loaded.step}, from {self.loaded.path}"
        if found and config.resume:
            return f"the next fit continues after step {checkpoint.step_of(found[-1])}, from {found[-1]}"
        remedy = "a checkpoint_dir" if config.checkpoint_dir is None else "" if config.resume else "resume=True"
        if isinstance(trained, checkpoint.TrainingProgress):
            would = f"; with {remedy} it would continue this one" if remedy else ""
            return (
                f"the model, the optimizer and history have what was trained, up to step {trained.step}. The next fit "
                f"begins a new run with them{would}"
            )
        if not remedy:
            return "the ranks were stopped before their first checkpoint, and the next fit begins at step 0"
        return f"what was trained is lost; with {remedy} the next fit would continue this run"

    def _fit(self, train: Data, valid: Data | None) -> checkpoint.TrainingProgress:
        TrainingRun(self, train, valid).run()
        return self.progress

    def checked_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """Return (loss, output, target) by `compute_loss`, with None for what it leaves out."""
        computed: Any = self.compute_loss(model, batch)
        loss, output, target = (*computed, None, None)[:3] if isinstance(computed, tuple) else (computed, None, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(
                f"compute_loss returned {_kind(loss)}: return a tensor with one element, or (loss, output)"
            )
        return loss, output, target

    # ------------------------------------------------------------------ validation and prediction
    def validate(self, data: Data) -> Results:
        """Return ``valid_loss`` and ``valid_<metric>`` over the data, every sample counted once.

        Like `fit` it launches ranks in a notebook, and runs as one of the ranks in a rank, with the same results on
        each.
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
                raise ArgumentError("metrics need the output: let compute_loss return (loss, output)")
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
        """Return the model's outputs for every sample of the data, once each and in its order, on the CPU.

        In a notebook it launches ranks, which send their outputs back once; in a rank each rank gets all of them. The
        model runs in eval mode and without gradients; a batch's targets are ignored. Override `predict_batch` for
        another output. For a moment the outputs are in memory twice.

        Args:
            data: A dataset, or a DataLoader that does not shuffle.

        Returns:
            What `predict_batch` returns, with the samples of all batches concatenated along dimension 0.

        Raises:
            ArgumentError: The loader shuffles or has a distributed sampler, or outputs are no tensors of samples.
            RuntimeError: The outputs of two batches have other sizes per sample.
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
            path: A file that `fit` has written, or a folder of them, whose latest is loaded.
            progress: Whether to continue that run: `epoch`, `step`, `history` and `best` are its own, and the next
                `fit` takes the steps that it would have taken, with the same settings. False: only the model and the
                optimizer; the next `fit` begins a new run, and refuses a `checkpoint_dir` with checkpoints unless
                ``resume=False`` replaces them.

        Raises:
            ArgumentError: There is no checkpoint, or another program wrote the file.
            RuntimeError: The file is damaged, or does not fit the model.
        """
        file = Path(path)
        if file.is_dir():
            found = checkpoint.find(file)
            if not found:
                raise ArgumentError(f"path={str(path)!r}: the folder has no checkpoint step-N.pt")
            file = found[-1]
        if not file.is_file():
            raise ArgumentError(f"path={str(path)!r}: there is no such file or folder")
        own = self._load_states(file)
        self.loaded = checkpoint.Loaded(file.absolute(), own.step, is_continued=progress)
        if progress:
            self.progress = own

    def restore_best(self) -> Best:
        """Load the model and the optimizer of the best step, and return it. The next `fit` is not affected.

        Raises:
            ArgumentError: No best checkpoint was kept.
        """
        folder = self.checkpoint_folder()
        if folder is None or not folder.best.exists():
            where = "checkpoint_dir=None" if folder is None else f"checkpoint_dir={str(folder.path)!r}"
            raise ArgumentError(
                f"{where}: no best checkpoint was kept: give TrainConfig a checkpoint_dir, and monitor, early_stop or "
                "restore_best; and no step is the best while the monitored result has never been a number"
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
                f"path={str(path)!r}: no checkpoint that fit has written. For a state dict of a model use "
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
        """Return the latest checkpoints, each with its time of change."""
        folder = self.checkpoint_folder()
        return [] if folder is None else [(path, path.stat().st_mtime_ns) for path in checkpoint.find(folder.path)]
