"""Trains a model: steps, with tests and checkpoints between them. `preparation` makes a Training from options."""

import contextlib
import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from tqdm import tqdm

from jax_rnnt_speech import runs
from jax_rnnt_speech.config import Config
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.system import UserError, hosts, outputs, programs, refuse_if
from jax_rnnt_speech.training import steps
from jax_rnnt_speech.training.devices import Devices
from jax_rnnt_speech.training.evaluation import Evaluation
from jax_rnnt_speech.training.parts import Parts
from jax_rnnt_speech.training.record import Record

HOPELESS = 100  # so many steps in a row that are not finite end the run


class Log:
    """Shows steps: in a bar, and in lines of metrics with the means since the previous line.

    `losses` are those since that line; a resumed run has them from its checkpoint.
    """

    def __init__(self, metrics, bar, losses):
        self.metrics, self.bar, self.losses = metrics, bar, [np.float32(x) for x in losses]
        self.begin()

    def begin(self):
        """Starts the count of seconds and steps."""
        self.timed, self.started = 0, time.perf_counter()

    def add(self, numbers):
        self.numbers = numbers
        self.losses.append(numbers["loss"])
        self.timed += 1
        self.bar.update()

    def write(self, step):
        numbers, losses = jax.device_get((self.numbers, self.losses))
        mean, (skipped, row) = float(np.mean(losses)), (int(numbers[name]) for name in ("skipped", "row"))
        seconds = (time.perf_counter() - self.started) / self.timed
        self.metrics.write(step, loss=mean, norm=numbers["norm"], skipped=skipped, seconds=seconds)
        self.bar.set_postfix(loss=f"{mean:.3f}", skipped=skipped, refresh=False)
        self.losses = []
        self.begin()
        refuse_if(row >= HOPELESS, f"step {step}: the last {row} were not finite; try a lower --learning-rate")


@contextlib.contextmanager
def rescuing(save):
    """Calls `save`, as after SIGTERM, where files cannot be read, unless it is None: nothing is computed yet."""
    try:
        yield
    except Exception as error:
        if not save or jax.process_count() > 1:  # the others do not come to this checkpoint, which takes all of them
            raise
        saved = save()
        if not isinstance(error, UserError | OSError):
            error.add_note(saved)
            raise
        raise UserError(f"{error}; {saved}") from None


@dataclasses.dataclass
class Training:
    """A training that is opened and checked; `main` runs it."""

    config: Config  # with --steps, which --epochs may have determined
    model: Model
    parts: Parts
    layers: int | None  # number of layers whose rows are in batches in place of features
    devices: Devices
    read: Callable  # returns the batches of the steps from one to another; one of them may be the `last`
    ended: bool  # whether no step is left
    shapes: int  # number of shapes of batches
    usual: float  # mean number of utterances in a batch
    record: Record
    evaluation: Evaluation
    reports: dict  # reports of corpora, by the option's name
    hook: Callable | None

    def main(self):
        """Trains; returns the best rates. For a run that has ended, it only tests, and writes nothing."""
        run, first = self.record.run, self.record.run.last or 0
        with contextlib.closing(run):
            if self.ended or self.record.impatient():
                step, params = self.record.best(self.devices)
                return self.evaluation.measured(params, step)
            state, frozen, step_of = self.begin(first)
            self.write_left_out()
            try:
                with (
                    contextlib.closing(runs.Metrics(run.workdir, first, self.hook)) as metrics,
                    runs.interruptions() as interrupted,
                ):
                    self.loop(state, frozen, step_of, first, metrics, interrupted)
            finally:
                self.write_left_out()  # with files that broke on the way
        best = self.record.progress
        counts = (len(step_of.shapes), "program"), (self.shapes, "shape")
        compiled = " for ".join(f"{n} {name}{'s' * (n != 1)}" for n, name in counts)
        hosts.say(f"{compiled} of batches; best test: step {best.step}")
        return best.rates

    def begin(self, first):
        """Returns the state of step `first`, the frozen parameters, and the jitted step."""
        optimiser, shard, devices = self.config.optimiser, self.config.compute.shard, self.devices
        params = devices.put(self.model.params, shard)
        del self.model.params  # from now on they are in the state
        weights, frozen = self.parts.free(params), self.parts.frozen(params)
        optimizer = steps.make_optimizer(optimiser, self.config.run.steps, self.parts.factors)
        make = functools.partial(steps.first_state, optimiser, optimizer)
        state = devices.shapes(jax.eval_shape(make, weights), shard)
        places = jax.tree.map(lambda x: x.sharding, state)
        if first:
            (training,) = self.record.run.restore(training=self.unused(state))
            state = training | {steps.used(optimiser): weights}
        else:
            state = jax.jit(make, out_shardings=places)(weights)
        cpus = devices.mesh.size * (devices.mesh.devices.flat[0].platform == "cpu")
        warmup = optimiser.accumulate * steps.updates_of(optimiser, self.config.run.steps)[1]
        step = steps.make_train_step(self.model, self.parts, optimizer, self.layers, places, cpus, self.usual, warmup)
        return state, frozen, programs.announced("a step of training", place=1)(step)

    def used(self, state, frozen):
        """Returns the parameters to test and use, the moving average if there is one. Every device has them."""
        params = self.parts.whole(state[steps.used(self.config.optimiser)], frozen)
        return self.devices.whole(params) if self.config.compute.shard else params

    def unused(self, state):
        """Returns the part of the state that a checkpoint stores besides the parameters that are used."""
        return {name: x for name, x in state.items() if name != steps.used(self.config.optimiser)}

    def loop(self, state, frozen, step_of, first, metrics, interrupted):
        plan, record, devices = self.config.run, self.record, self.devices
        wait = devices.mesh.devices.flat[0].platform == "cpu"
        bar = tqdm(total=plan.steps, initial=first, unit="step", disable=bool(jax.process_index()),
                   mininterval=0.2 if sys.stderr.isatty() else 20)  # fmt: skip
        command = f"rnnt-speech train --workdir {shlex.quote(str(record.run.workdir))} --resume"
        log = Log(metrics, bar, record.losses)

        def save():
            """Saves the step, unless that is done; returns a line about it."""
            if record.at != step:
                record.save(step, self.used(state, frozen), self.unused(state), log.losses)
            return f"step {step} is saved: {command} goes on"

        with bar:
            batches, step = iter(self.read(first, plan.steps)), first
            while True:
                with rescuing(save if step else None):
                    batch = next(batches, None)
                if batch is None:
                    return
                step += 1
                batch.pop("index")
                last = batch.pop("last", step == plan.steps)
                state, numbers = step_of(state, devices.split(batch), frozen, step)
                log.add(numbers)
                if wait:  # with several steps in flight, XLA's all-reduce between CPU devices can deadlock
                    jax.block_until_ready(numbers)
                stopped = bool(interrupted)
                if step % plan.log_every == 0 or last:
                    log.write(step)
                    record.run.check()
                tested = step % (plan.valid_every or plan.save_every) == 0 or last
                if tested:
                    params = self.used(state, frozen)
                    with rescuing(save):
                        rates = self.test(params, step, metrics)
                    record.tested(step, rates, params)
                    del params  # the next step does not need them, and takes the memory of the state
                ends = tested and record.impatient()
                if step % plan.save_every == 0 or last or stopped or ends:
                    save()
                if tested:
                    log.begin()
                if ends:
                    hosts.say(f"step {step}: the last {plan.patience} tests were not better: the run ends")
                    return
                if stopped and not last:
                    raise interrupted[0](f"interrupted; {save()}")

    def test(self, params, step, metrics):
        rates = self.evaluation.measured(params, step)
        metrics.write(step, **{f"valid_{name}": x for name, x in rates._asdict().items()})
        return rates

    def write_left_out(self):
        """Writes the names of left-out utterances, which are no part of the state either."""
        for name, report in self.reports.items():
            path = self.record.run.workdir / runs.LEFT_OUT.format(f"{name}{jax.process_index() or ''}")
            try:
                with outputs.whole(path) as part:
                    report.write(part)
            except UserError as error:
                tqdm.write(f"{error}", file=sys.stderr)
