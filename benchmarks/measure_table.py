"""From a sweep that measured everything once (searcher=factored) to a table on which searchers are replayed.

Run:    python sweeps/run.py space=lora_small searcher=factored budget.trials=null … runs_dir=/tmp/measured
        python benchmarks/measure_table.py /tmp/measured/<sweep id> cpu      # writes benchmarks/tables/cpu.json
        python benchmarks/search.py --table cpu
Reads:  speed and memory of every way to divide the work, the eval losses of every way to learn, and what was predicted
        of them. A way that did not run is left out, and said.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import replay, tables
from benchmarks.replay import LearningTruth, SystemTruth, Table
from sweeps import space
from sweeps.candidates import Candidate
from sweeps.compose import arm_key, key_of, learning_of, system_of
from sweeps.guide.arms import arms_of
from sweeps.journal import Journal
from sweeps.outcome import TrialOutcome
from sweeps.predict import STEP, SUM
from sweeps.search import Prior


def table_of(folder: Path, name: str) -> Table:
    """Return the table of a sweep. Its target must be set."""
    journal = Journal(folder)
    spec = space.validate(journal.spec_tree(), Path.cwd(), {})
    outcomes = [o for o in journal.read() if o.repeats is None]
    systems = {arm_key(o.config): truth for o in outcomes if (truth := _system(o)) is not None}
    learnings = {
        key_of(learning_of(o.config)): LearningTruth(o.curve) for o in outcomes if o.kind != "probe" and o.curve
    }
    lines = [json.loads(text) for text in (folder / "candidates.jsonl").read_text(encoding="utf-8").splitlines()]
    legal = [line for line in lines if line["state"] != "pruned"]
    every = [Candidate(line["id"], learning_of(line["config"]), system_of(line["config"]), 1) for line in legal]
    candidates = [c for c in every if key_of(learning_of(c.flat)) in learnings]
    arms = arms_of(candidates)
    left_out = [arm for arm in arms if (arm.load, arm.system) not in systems]
    for arm in left_out:
        print(f"left out, since it did not run: {arm.candidate.system}")
    kept: list[Candidate] = [c for arm in arms if (arm.load, arm.system) in systems for c in arm.by_learning.values()]
    startups = [o.metrics["startup_time_s"] for o in outcomes if "startup_time_s" in o.metrics]
    price = spec.price_per_gpu_hour if spec.price_per_gpu_hour is not None else 1.0
    target = spec.target_eval_loss
    assert target is not None, "give the sweep a target_eval_loss"
    startup = statistics.median(startups) if startups else 1.0
    return Table(name, tuple(kept), systems, learnings, target, 1e9, price, startup)


def _system(outcome: TrialOutcome) -> SystemTruth | None:
    m, names = outcome.metrics, ("peak_memory_gib", "step_time_s", "tokens_per_second", "target_tokens_per_second")
    if outcome.status != "COMPLETED" or any(name not in m for name in (*names, SUM, STEP)):
        return None
    step = m["step_time_s"]
    prior = Prior(m[SUM], m[STEP], m["tokens_per_second"] * step, m["target_tokens_per_second"] * step)
    return SystemTruth(m["peak_memory_gib"], step, m.get("eval_time_s", 0.0), prior)


def main(folder: str, name: str) -> int:
    """Write the table of a sweep's folder."""
    table = table_of(Path(folder), name)
    tables.folder().mkdir(exist_ok=True)
    path = tables.folder() / f"{name}.json"
    replay.save(table, path)
    print(f"{len(table.systems)} systems, {len(table.learnings)} learning configurations: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
