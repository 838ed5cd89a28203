"""The desk of a sweep: it hands out trials within the budget and takes their endings."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sweeps import cost, predict, signals
from sweeps.candidates import Candidate, Context, trial_tree
from sweeps.curve import loss_at
from sweeps.journal import Journal
from sweeps.outcome import TrialOutcome
from sweeps.parity import References
from sweeps.record import Recorder
from sweeps.scaling import RATE
from sweeps.search import Ask, Request, Searcher, all_tried
from sweeps.spec import SweepSpec
from sweeps.standing import Standing, standing
from sweeps.trial import Ending, Job
from trainers.config import TrialConfig, from_tree, to_tree
from trainers.result import TrialResult
from trainers.timing import impossible, peak_phase, summarize

SAME_FAILURES = 3  # identical failures in a row, with nothing completed, that end a sweep
KEPT = 0.25  # of a budget, at most, for confirmations
REFERENCE_SHARE = 0.5  # a derived target is what the first trial reaches with this share of its tokens
REFERENCE_TRIES = 3  # candidates that may serve as the reference before the sweep goes on without a target


class Screen(Protocol):
    """What a person sees while a sweep runs."""

    def note(self, text: str) -> None: ...

    def planned(self, candidates: Sequence[Candidate], to_run: int) -> None: ...

    def started(self, job: Job, candidate: Candidate) -> None: ...

    def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None: ...

    def ended(self, outcome: TrialOutcome) -> None: ...

    def stands(self, standing: Standing) -> None: ...


class SweepDesk:
    """Hands out trials within the budget, takes their endings, and keeps journal, searcher and MLflow in step."""

    def __init__(
        self,
        spec: SweepSpec,
        searcher: Searcher,
        journal: Journal,
        recorder: Recorder,
        screen: Screen,
        context: Context,
        prices: cost.Prices,
    ) -> None:
        self.spec, self.searcher, self.journal, self.recorder = spec, searcher, journal, recorder
        self.screen, self.context, self.prices = screen, context, prices
        self._started: float | None = None  # when the first trial was asked for
        self._resumed = len(journal.outcomes)  # what failed before may have been mended since
        self.target = spec.target_eval_loss
        self.why = ""
        self.spent: str | None = None  # the key of the budget that is the reason
        self._running: dict[str, Candidate] = {}
        self._waiting: Request | None = None  # asked for, but its workers did not fit yet
        self._reference: str | None = None  # the trial that the target is derived from, while it runs
        self._references_tried = 0
        self._proofs = References()
        for outcome in journal.outcomes:
            self._derive_target(outcome)
            if (measured := outcome.measured) is not None:
                self._proofs.add(outcome.trial_config["learning"], measured.proof, outcome.trial_id)

    # -- the launcher's side ------------------------------------------------------------------------------------

    @property
    def widest(self) -> int:
        return max((c.num_workers for c in self.searcher.candidates), default=1)

    def next(self, free_workers: int) -> Job | Ask:
        signals.check()
        self._started = self._started or time.time()
        if self._reference is not None:
            return Ask.WAIT  # every later trial needs the target that this one sets
        if self._spent():
            return Ask.FINISHED if not self._running else Ask.WAIT
        if (again := self._to_remeasure()) is not None:
            return self._remeasure(again) if again.num_workers <= free_workers else Ask.WAIT
        self.searcher.closing = self._closing()
        answer: Request | Ask = self._waiting or self.searcher.ask()
        self._waiting = None
        if isinstance(answer, Ask):
            if answer is Ask.FINISHED and not self._running:
                self.why = self.why or self.searcher.why or all_tried(self.searcher)
            return answer if not self._running else Ask.WAIT
        if answer.candidate.num_workers > free_workers:
            self._waiting = answer  # keeps its place: smaller trials do not overtake it
            return Ask.WAIT
        return self._start(answer)

    def finish(self, job: Job, ending: Ending) -> None:
        candidate = self._running.pop(job.trial_id)
        self._reference = None
        measured = TrialResult.from_json(ending.result) if ending.result is not None else None
        if measured is not None:
            self._proofs.add(job.config["learning"], measured.proof, job.trial_id)
        outcome = self._outcome(job, candidate, ending, measured)
        before = self.target
        self._derive_target(outcome)
        if self.target != before:
            outcome = self._outcome(job, candidate, ending, measured)  # now with the target that it set
        with signals.held():
            self.journal.append(outcome)
            if outcome.repeats is None:
                self.searcher.tell(outcome)
            self.recorder.record(outcome)
            self.screen.ended(outcome)
            self.screen.stands(standing(self.journal.outcomes, self.searcher.objectives, self.prices.gpu_hour))

    def progress(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        self.screen.progress(trial_id, facts)

    def should_stop(self) -> bool:
        minutes = self.spec.budget.minutes
        return minutes is not None and self._used()["minutes"] >= minutes

    # -- the budget ---------------------------------------------------------------------------------------------

    def trials_left(self) -> int:
        """Return how many trials may still start."""
        left = self.searcher.left
        limit = self.spec.budget.trials
        return left if limit is None else max(0, min(left, limit - self._finished))

    @property
    def failing(self) -> bool:
        """Tell whether the trials of this process all fail alike."""
        return repeats_itself(self.journal.outcomes[self._resumed :])

    @property
    def _finished(self) -> int:
        return sum(not o.cut_short and o.repeats is None for o in self.journal.outcomes)

    def _used(self) -> dict[str, float]:
        """Return what was used of each budget, trials that are running included where they are counted."""
        return {
            "trials": self._finished + len(self._running),
            "minutes": (time.time() - self._started) / 60 if self._started is not None else 0.0,
            "gpu_hours": sum(o.gpu_hours for o in self.journal.outcomes),
        }

    def _spent(self) -> bool:
        budget, outcomes, used = self.spec.budget, self.journal.outcomes, self._used()
        failure = outcomes[-1].reason if outcomes else ""
        others = {
            "the base model already meets target_eval_loss; give a lower one": met_by_the_base(outcomes[-1:]),
            f"the last {SAME_FAILURES} trials all failed alike: {failure}": self.failing,
        }
        limits = {name: getattr(budget, name) for name in used}
        spent = [name for name, limit in limits.items() if limit is not None and used[name] >= limit]
        reasons = [f"budget.{name}={limits[name]} is spent" for name in spent]
        reasons += [text for text, holds in others.items() if holds]
        if reasons and self.searcher.left:
            self.why, self.spent = reasons[0], f"budget.{spent[0]}" if spent else None
        return bool(reasons)

    def _closing(self) -> bool:
        """Tell whether what is left of the budget is kept for confirmations: as many trials, a quarter at most."""
        budget, confirm = self.spec.budget, self.spec.confirm
        used = self._used()
        if budget.trials is not None and budget.trials - used["trials"] <= min(confirm, KEPT * budget.trials):
            return True
        limits = {"minutes": budget.minutes, "gpu_hours": budget.gpu_hours}
        return any(limit is not None and used[name] >= (1 - KEPT) * limit for name, limit in limits.items())

    # -- one trial ----------------------------------------------------------------------------------------------

    def _start(self, request: Request) -> Job:
        candidate = request.candidate
        trial_id, attempt = self._next_attempt(request)
        job = Job(
            trial_id,
            attempt,
            candidate.id,
            candidate.num_workers,
            int(candidate.learning["seq_len"]),
            trial_tree(
                self.spec,
                candidate,
                self.context.cluster.device,
                self.target,
                self._proof_of(candidate),
                str((self.journal.folder / "traces" / trial_id).resolve()),
                request,
            ),
            time.time(),
            kind=request.kind,
            why=request.why,
        )
        self._running[job.trial_id] = candidate
        if self.target is None and self._references_tried < REFERENCE_TRIES and request.kind != "probe":
            self._reference = job.trial_id
        self.screen.started(job, candidate)
        return job

    def _to_remeasure(self) -> TrialOutcome | None:
        """Return the fastest trial so far, where it is time to see whether the machine is still as fast."""
        every, outcomes = self.spec.remeasure_every, self.journal.outcomes
        since = list(itertools.takewhile(lambda o: o.repeats is None, reversed(outcomes)))
        ran = [o for o in outcomes if o.competes and o.metrics.get(RATE)]
        if not every or not self.spec.measure_seconds or len(since) < every or not ran or not self.searcher.left:
            return None
        if any(c.id in {o.candidate_id for o in ran} for c in self._running.values()):
            return None  # it is being timed
        return max(ran, key=lambda o: o.metrics[RATE])

    def _remeasure(self, outcome: TrialOutcome) -> Job:
        candidate = next(c for c in self.searcher.candidates if c.id == outcome.candidate_id)
        run = {**outcome.trial_config["run"], "target_eval_loss": None, "max_updates": 1, "proof": "none"}
        config = {**outcome.trial_config, "run": run}
        seq_len = int(candidate.learning["seq_len"])
        job = Job(
            self._next_id(), 1, candidate.id, candidate.num_workers, seq_len, config, time.time(), outcome.trial_id
        )
        self._running[job.trial_id] = candidate
        self.screen.started(job, candidate)
        return job

    def _proof_of(self, candidate: Candidate) -> str:
        """Return how a trial proves itself: the first of a learning configuration also measures what is right."""
        wanted = self.spec.proof
        return "steps" if wanted == "reference" and candidate.learning in self._proofs else wanted

    def _next_attempt(self, request: Request) -> tuple[str, int]:
        """Return trial id and attempt of a candidate's next trial: a new id, unless its trial was cut short."""
        same = [o for o in self.journal.outcomes if o.candidate_id == request.candidate.id and o.kind == request.kind]
        cut_short = [o for o in same if o.cut_short]
        if cut_short and same[-1].cut_short:
            return cut_short[-1].trial_id, cut_short[-1].attempt + 1
        return self._next_id(), 1

    def _next_id(self) -> str:
        # After the highest: with trials side by side an interrupt leaves gaps, and an id is never given twice.
        taken = [int(trial) for trial in (*(o.trial_id for o in self.journal.outcomes), *self._running)]
        return f"{max(taken, default=-1) + 1:03d}"

    def _outcome(self, job: Job, candidate: Candidate, ending: Ending, measured: TrialResult | None) -> TrialOutcome:
        known: dict[str, Any] = {
            "sweep_id": self.journal.sweep_id,
            "trial_id": job.trial_id,
            "candidate_id": candidate.id,
            "attempt": job.attempt,
            "started_at": job.started_at,
            "ended_at": time.time(),
            "num_workers": candidate.num_workers,
            "kind": "probe" if job.repeats else job.kind,
            "repeats": job.repeats,
            "trial_config": dict(job.config),
            "config": {**candidate.flat, "gradient_accumulation_steps": candidate.gradient_accumulation_steps},
        }
        if measured is None:
            fault = ending.fault
            assert fault is not None, "an ending has a result or a fault"
            oom = fault.status == "OOM"
            return TrialOutcome(
                **known,
                status=fault.status,
                reason_kind=fault.kind,
                reason=fault.message,
                details=tuple(fault.lines),
                phase=fault.phase,
                rank=fault.rank,
                traceback=fault.traceback,
                metrics=predict.figures(known["config"], self.context) if oom else {},
            )
        if different := drift(job.config, measured.effective_config):
            return TrialOutcome(
                **known,
                status="FAILED",
                reason_kind="crash",
                reason=f"the worker ran another configuration than it was given: {different}",
            )
        figures = summarize(measured)
        if wrong := impossible(figures):
            return TrialOutcome(**known, status="FAILED", reason_kind="crash", reason=wrong)
        if job.repeats or job.kind == "probe":  # its update serves nothing but the measurement
            figures = {name: value for name, value in figures.items() if name not in LEARNED}
        else:
            figures |= cost.quality_figures(measured, self.target, self.prices)
        figures |= predict.figures(known["config"], self.context)
        figures |= self._start_up(job, known["ended_at"], measured)
        parity = self._proofs.judge(job.config["learning"], measured.proof)
        figures |= parity.figures if parity is not None else {}
        peak = peak_phase(measured)
        status, kind, reason = verdict(measured, self.target if not job.repeats and job.kind != "probe" else None)
        return TrialOutcome(
            **known,
            status=status,
            reason_kind=kind,
            reason=reason,
            metrics=figures,
            phase=peak[0] if peak else None,
            rank=peak[1] if peak else None,
            parity=parity,
            result=dict(ending.result or {}),
        )

    def _start_up(self, job: Job, ended_at: float, measured: TrialResult) -> dict[str, float]:
        """Return the seconds that a trial spent outside training, evaluating and saving, and their price."""
        busy = sum(u.step_time_s for u in measured.updates) + sum(e.seconds for e in measured.evaluations)
        busy += sum(s.seconds for s in measured.saves)
        seconds = max(0.0, ended_at - job.started_at - busy)
        return {
            "startup_time_s": seconds,
            "startup_cost_usd": self.prices.gpu_hour * job.num_workers * seconds / 3600,
            "wall_time_s": ended_at - job.started_at,
        }

    # -- the target ---------------------------------------------------------------------------------------------

    def _derive_target(self, outcome: TrialOutcome) -> None:
        """Without a target in the spec, the first trial that learns sets it for all."""
        if self.target is not None or self._references_tried >= REFERENCE_TRIES or outcome.cut_short:
            return
        if outcome.kind == "probe":
            return
        self._references_tried += 1
        measured = outcome.measured
        self.target = derived_target(measured) if measured is not None and outcome.status == "COMPLETED" else None
        if self.target is not None:
            self.screen.note(
                f"target_eval_loss={self.target:.4f}, derived from trial {outcome.trial_id}: what it reached "
                f"with {REFERENCE_SHARE:.0%} of its tokens"
            )
        elif self._references_tried == REFERENCE_TRIES:
            self.screen.note(
                f"no target could be derived: the first {REFERENCE_TRIES} trials did not learn; trials have "
                "no cost per quality. Give target_eval_loss=…"
            )


LEARNED = ("eval_loss", "eval_loss_start", "train_loss", "updates", "consumed_tokens")
"""Figures of what a trial learned."""


def verdict(measured: TrialResult, target: float | None) -> tuple[Any, Any, str]:
    """Return status, kind and reason of a job that came to an end."""
    last = measured.evaluations[-1].loss if measured.evaluations else math.nan
    tokens = measured.updates[-1].consumed_tokens if measured.updates else 0
    match measured.stop_reason:
        case "nan":
            return "STOPPED", "nan", f"loss or gradient is not finite after {tokens:,} tokens"
        case "diverged":
            return "STOPPED", "diverged", f"eval loss rose from {measured.evaluations[0].loss:.3f} to {last:.3f}"
        case "dominated" if not measured.updates:
            return "STOPPED", "dominated", "others take less memory and are faster, for certain: timed no longer"
        case "dominated":
            return (
                "STOPPED",
                "dominated",
                f"eval loss {last:.4f} after {tokens:,} tokens: others are shown to be better",
            )
        case "requested":
            return "STOPPED", "budget", f"the sweep's time was over after {tokens:,} tokens"
    if measured.stop_reason == "target" and not measured.updates:
        return (
            "COMPLETED",
            None,
            f"the base model's eval loss {last:.4f} meets the target {target}: nothing was trained",
        )
    if target is not None and cost.tokens_to_target(measured.evaluations, target) is None:
        return "COMPLETED", "budget", f"eval loss {last:.4f} after {tokens:,} tokens, target {target:.4f} not reached"
    return "COMPLETED", None, ""


def met_by_the_base(outcomes: Sequence[TrialOutcome]) -> bool:
    """Tell whether one of these trials met its target before the first update."""
    return any(o.metrics.get("tokens_to_target") == 0 for o in outcomes)


def derived_target(measured: TrialResult) -> float | None:
    """Return the eval loss, interpolated, after REFERENCE_SHARE of the run's tokens; None if nothing was learned."""
    curve = [(e.consumed_tokens, e.loss) for e in measured.evaluations]
    loss = loss_at(curve, REFERENCE_SHARE * curve[-1][0])
    return loss if loss is not None and loss < curve[0][1] else None


def drift(given: Mapping[str, Any], ran: Mapping[str, Any]) -> str:
    """Return how the configuration that a worker ran differs from the one it was given; empty if it does not."""
    wanted = to_tree(from_tree(TrialConfig, given))
    return ", ".join(f"{key}: {wanted[key]} → {ran.get(key)}" for key in wanted if wanted[key] != ran.get(key))


def repeats_itself(outcomes: Sequence[TrialOutcome]) -> bool:
    """Tell whether nothing has completed and the last trials failed for one and the same reason."""
    last = outcomes[-SAME_FAILURES:]
    if len(last) < SAME_FAILURES or any(o.status == "COMPLETED" for o in outcomes):
        return False
    return last[0].status == "FAILED" and len({(o.status, o.reason_kind, o.phase, o.reason) for o in last}) == 1
