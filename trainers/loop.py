"""The training loop of one trial or production run, to be read from top to bottom."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainers import batch as batching
from trainers import checkpoint
from trainers.batch import Window
from trainers.checkpoint import Identity
from trainers.config import TrialConfig, to_tree
from trainers.engine import Engine
from trainers.environment import describe
from trainers.feed import Feed
from trainers.layout import Layout
from trainers.ledger import MicroBatch
from trainers.memory import MemoryMeter, host_peak_bytes
from trainers.model import shape
from trainers.parity import Prover
from trainers.prepare import TrialData
from trainers.publish import publish
from trainers.ranks import World
from trainers.result import Evaluation, History, Proof, Save, Speed, StopReason, TrialResult, Update
from trainers.speed import Probe
from trainers.strategies import STRATEGIES, Setting
from trainers.timing import Stopwatch
from trainers.token_loss import keeps_heads
from trainers.traces import Traces

DIVERGED = 1.5  # an evaluation above this multiple of the first one ends the run


@dataclass(frozen=True)
class Hooks:
    """What the outside world may do during a run. Called on rank 0 only, between updates."""

    progress: Callable[[Mapping[str, Any]], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False


def train(
    config: TrialConfig, data: TrialData, world: World, meter: MemoryMeter, hooks: Hooks | None = None
) -> TrialResult:
    """Train, evaluate and save as `config` says; return what was measured, the same on every rank."""
    hooks = hooks or Hooks()
    history = History()
    seconds: dict[str, float] = {}
    learning, system = config.learning, config.system
    strategy = STRATEGIES[system.strategy]
    plan = strategy.plan(system)
    setting = Setting(learning, system, plan, shape(config.model, config.model_revision), world.device.type)
    layout = Layout(plan, world)
    assert plan.world == world.size, f"the plan needs {plan.world} ranks, the job has {world.size}"
    accumulation = setting.micro_batches  # raises where it does not divide

    # 1. What will be consumed: every rank knows all windows, and so all token counts, in advance.
    samples = data.train.samples()
    updates = batching.plan_updates(
        samples, learning.global_batch_size, learning.seed, max_tokens=config.run.max_tokens, epochs=config.run.epochs
    )
    prints = batching.fingerprints(updates, samples)
    feed = Feed(data, plan.dp, layout.dp_rank, system.micro_batch_size, world.device, system.arrangement, plan.pp > 1)
    updates = [feed.arranged(window) for window in updates]
    meter.batch = feed.running(setting)
    folder = Path(config.run.output_dir) / "checkpoints" if config.run.output_dir else None
    found = checkpoint.latest(folder, world) if folder is not None else None
    identity = learning_identity(config, data)
    if found is not None:
        checkpoint.check(found, identity, strategy.engine(setting).saved_as(setting, world.size))

    # 2. What one process would do, while no rank holds a model yet.
    prover = Prover(config.run.proof if found is None else "none", setting, layout)
    with timed(seconds, "proof"):
        prover.alone(config, data, updates)

    # 3. Model, adapter, strategy, optimizer, in the order that trainers.build shows.
    built: list[Engine] = []
    with timed(seconds, "model"), meter.tracing(lambda: built[0].owned() if built else ()), meter.phase("load"):
        engine = strategy.make_engine(config.model, config.model_revision, setting, layout, len(updates))
        built.append(engine)
    # Ranks that hold other tokens draw other dropout masks; those that share them (tp) the same.
    torch.manual_seed(learning.seed + layout.dp_rank * plan.cp + layout.at["cp"])

    # 4. Rehearse the worst batch, time windows that stand for the data, and forget both again; then go on from the last
    #    save, or evaluate what is there.
    traces = Traces(config, world)
    speed: Speed | None = None
    with engine.undone():
        with timed(seconds, "rehearsal"), traces.memory(meter):
            rehearse(engine, feed, updates, accumulation, meter)
        if config.run.measure_seconds and found is None:
            speed = Probe(engine, feed, config, setting, meter, world).run(traces.time)
    dominated = speed is not None and speed.dominated  # then there is nothing to train for
    world.synchronize()
    if found is not None:
        history = checkpoint.resume(found, engine, identity, world)
        if world.rank == 0:
            hooks.progress({"phase": "resume", "from": str(found), "update": len(history.updates)})
    elif not dominated:
        if world.rank == 0:
            hooks.progress({"phase": "evaluate", "updates": len(updates)})
        history.evaluations.append(evaluate(engine, feed, history, world, meter))
    resumed_at = len(history.updates)
    if not dominated:
        prover.together(engine, feed, updates)

    # 5. Update after update; evaluate and save in between; stop for a reason.
    stop: StopReason = "dominated" if dominated else verdict(history, config) or "budget"
    clock = Stopwatch(world)
    end = min(len(updates), config.run.max_updates or len(updates))
    while stop == "budget" and (done := len(history.updates)) < end:
        window = updates[done]
        clock.start()
        micro_batches, counts = feed.window(window)
        step = engine.step(micro_batches, counts.targets, meter)
        step_time_s = clock.stop()
        loss = step.loss_sum / max(counts.targets, 1)
        history.updates.append(
            Update(
                window.update,
                history.consumed_tokens + counts.tokens,
                counts.tokens,
                counts.targets,
                counts.slots,
                loss,
                step.grad_norm,
                step.learning_rate,
                step_time_s,
            )
        )
        if world.rank == 0:
            hooks.progress({"phase": "train", "update": done + 1, "updates": len(updates), "loss": loss})
        if not math.isfinite(loss) or not math.isfinite(step.grad_norm):
            stop = "nan"
            break
        at_end = done + 1 == end
        if at_end or evaluation_due(history, config):
            history.evaluations.append(evaluate(engine, feed, history, world, meter))
            stop = verdict(history, config) or stop
            if stop == "budget" and not at_end and world.broadcast(hooks.should_stop):
                stop = "requested"
        every = config.run.save_every_updates
        if folder is not None and every and (done + 1) % every == 0 and not at_end and stop == "budget":
            history.saves.append(timed_save(folder, engine, history, identity, world, meter))

    # 6. One save at the end, kept only where an output folder was asked for, and then beside it what others load; a
    #    finished run that is started again has nothing new to save.
    if stop != "nan" and not dominated and (found is None or len(history.updates) > resumed_at):
        history.saves.append(final_save(folder, engine, history, identity, world, meter))
    if stop != "nan" and folder is not None and history.updates:
        publish(folder.parent, engine, config, layout, again=len(history.updates) > resumed_at)
    engine.close()
    proof = prover.result(history)
    largest = feed.largest(updates, only_targets=keeps_heads(setting))
    return assemble(config, slowest(history, world), stop, prints, seconds, meter, world, proof, speed, largest)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long what is inside takes."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def rehearse(engine: Engine, feed: Feed, updates: Sequence[Window], accumulation: int, meter: MemoryMeter) -> None:
    """Do two updates and an evaluation, with the largest micro batch of the run; to be called where that is undone.

    The first update, on the smallest one, makes the optimizer's state. The second runs the largest with all of it, and
    with accumulation beside the gradients of the smallest. Memory is known before time is spent, on the batch where it
    peaks; tracing is slow, and more of the largest batch would show nothing more. Kernels and allocator are warm then.
    """
    with meter.tracing(engine.owned):
        for micro_batches, targets in feed.extremes(updates, accumulation):
            engine.step(micro_batches, targets, meter)
        with meter.phase("eval"):
            engine.evaluate(itertools.islice(feed.evaluation(), 1))


def evaluate(engine: Engine, feed: Feed, history: History, world: World, meter: MemoryMeter) -> Evaluation:
    """Evaluate on all evaluation data; the loss is the mean over its target tokens."""
    start = time.perf_counter()
    with meter.phase("eval"):
        total = engine.evaluate(feed.evaluation())
    seconds = world.max([time.perf_counter() - start])[0]
    return Evaluation(len(history.updates), history.consumed_tokens, total / feed.eval_targets, seconds)


def evaluation_due(history: History, config: TrialConfig) -> bool:
    """Tell whether the last update crossed a multiple of eval_every_tokens."""
    every = config.run.eval_every_tokens
    if every is None:
        return False
    before = history.consumed_tokens - history.updates[-1].tokens
    return history.consumed_tokens // every > before // every


def verdict(history: History, config: TrialConfig) -> StopReason | None:
    """Return why the run should end after its last evaluation, if it should."""
    first, last, target = history.evaluations[0].loss, history.evaluations[-1].loss, config.run.target_eval_loss
    if not math.isfinite(last):
        return "nan"
    if target is not None and last <= target:
        return "target"
    if last > DIVERGED * first:
        return "diverged"
    behind = any(history.consumed_tokens >= tokens and last > loss for tokens, loss in config.run.rungs)
    return "dominated" if behind else None


def final_save(
    folder: Path | None, engine: Engine, history: History, identity: Identity, world: World, meter: MemoryMeter
) -> Save:
    """Save once; into a folder that is removed again where no output folder was asked for."""
    if folder is not None:
        return timed_save(folder, engine, history, identity, world, meter)
    with shared_temporary_folder(world) as temporary:
        return timed_save(temporary, engine, history, identity, world, meter)


def timed_save(
    folder: Path, engine: Engine, history: History, identity: Identity, world: World, meter: MemoryMeter
) -> Save:
    history = slowest(history, world)
    start = time.perf_counter()
    with meter.tracing(engine.owned), meter.phase("save"):
        size = checkpoint.save(folder, engine, history, identity, world)
    seconds = world.max([time.perf_counter() - start])[0]
    save = Save(history.consumed_tokens, seconds, size)
    checkpoint.complete_history(folder, replace(history, saves=[*history.saves, save]), world)
    return save


@contextmanager
def shared_temporary_folder(world: World) -> Iterator[Path]:
    """Give all ranks rank 0's temporary folder (ranks on other machines make the same path there)."""
    path = Path(world.broadcast(lambda: tempfile.mkdtemp(prefix="sweep-save-")))
    try:
        yield path
        world.barrier()
    finally:
        shutil.rmtree(path, ignore_errors=True)


def learning_identity(config: TrialConfig, data: TrialData) -> dict[str, Any]:
    """Return what decides the course of learning: model, data, learning configuration."""
    return {
        "model": config.model,
        "model_revision": config.model_revision,
        **{f"learning.{name}": value for name, value in to_tree(config.learning).items()},
        "data (fingerprint of its tokens)": data.train.fingerprint,
        "run.max_tokens": config.run.max_tokens,
        "run.epochs": config.run.epochs,
    }


def slowest(history: History, world: World) -> History:
    """Return the history with each update's time on the slowest rank. Every rank must call it."""
    times = world.max([u.step_time_s for u in history.updates])
    updates = [replace(u, step_time_s=s) for u, s in zip(history.updates, times, strict=True)]
    return replace(history, updates=updates)


def assemble(
    config: TrialConfig,
    history: History,
    stop: StopReason,
    prints: Sequence[str],
    seconds: Mapping[str, float],
    meter: MemoryMeter,
    world: World,
    proof: Proof | None,
    speed: Speed | None,
    largest: MicroBatch,
) -> TrialResult:
    """Combine the ranks: times are the slowest rank's, memory the largest."""
    return TrialResult(
        stop_reason=stop,
        updates=tuple(history.updates),
        evaluations=tuple(history.evaluations),
        saves=tuple(history.saves),
        memory=meter.peaks(world),
        host_peak_bytes=int(world.max([host_peak_bytes()])[0]),
        fingerprints=tuple(prints[: len(history.updates)]),
        seconds=seconds,
        num_workers=world.size,
        effective_config=to_tree(config),
        environment=describe(world),
        proof=proof,
        speed=speed,
        largest=asdict(largest),
    )
