"""What the page of a sweep shows."""

from __future__ import annotations

import base64
import json
import zlib

from sweeps import mlflow_note, mlflow_page
from sweeps import mlflow_view as view
from sweeps.spec import SweepSpec
from tests.sweeps.record.trials import SPEC, SWEEP, Store, failed, front, outcome


def test_the_saved_view_opens_the_comparison(store: Store) -> None:
    """The contract with the pinned MLflow: format and key as its page reads them."""
    recorder = store.recorder()
    recorder.close([outcome(0)], front([outcome(0)]), "FINISHED", "done", "1")
    experiment = store.client.get_experiment_by_name("lora_small")
    saved = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP}"])
    assert set(saved) == {"name", "createdAt", "state"}
    assert saved["state"].startswith("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(saved["state"].removeprefix("deflate;"))))
    assert state["searchFilter"] == f"tags.sweep.role = 'trial' and tags.sweep.id = '{SWEEP}'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`frontier/rank`", True)
    assert {"metrics.`cost/cost_per_quality_usd`", "params.`micro_batch_size`"} <= set(state["selectedColumns"])
    shown = [c for c in state["compareRunCharts"] if not c["deleted"]]
    assert [c["type"] for c in shown] == ["SCATTER"] * 3 + ["PARALLEL"] + ["LINE"] * 2
    assert shown[0]["xaxis"] == {"key": "memory/peak_memory_gib", "type": "METRIC"}
    assert shown[3]["selectedParams"] == ["learning_rate", "micro_batch_size"]
    assert shown[3]["selectedMetrics"] == [view.metric_key(name) for name in SPEC.objectives]
    sections = {s["uuid"] for s in state["compareRunSections"]}
    assert all(c["metricSectionId"] in sections for c in state["compareRunCharts"])
    (run,) = store.runs("trial")
    drawn = {c["metricKey"] for c in state["compareRunCharts"] if "metricKey" in c}
    assert set(run.data.metrics) <= drawn  # any other would get a chart of its own


def test_parallel_coordinates_have_the_axes_that_all_trials_have() -> None:
    """The page leaves out every run that lacks one: with an axis of one strategy it would show none of the others."""
    axes = {"learning": {"learning_rate": [1e-4, 2e-4]}, "system": {"strategy": ["ddp", "zero"], "zero_stage": [2, 3]}}
    spec = SweepSpec.model_validate({"space": "lora_small", **axes})
    zero = outcome(0, config={"learning_rate": 1e-4, "strategy": "zero", "zero_stage": 2})
    ddp = outcome(1, config={"learning_rate": 1e-4, "strategy": "ddp"})
    for trials, shared in (([zero], ["zero_stage"]), ([zero, ddp], [])):
        saved = json.loads(mlflow_page.saved_view(spec, SWEEP, trials, 0))
        state = json.loads(zlib.decompress(base64.b64decode(saved["state"].removeprefix("deflate;"))))
        (chart,) = [c for c in state["compareRunCharts"] if c["type"] == "PARALLEL"]
        assert sorted(chart["selectedParams"]) == sorted(["learning_rate", "strategy", *shared])
        assert "params.`zero_stage`" in state["selectedColumns"]


def test_the_note_fits_with_500_trials() -> None:
    trials = [
        outcome(n, memory=1 + n, speed=1000.0 + n, config={"strategy": "s" * 40, "learning_rate": 1e-4})
        if n % 2
        else failed(n)
        for n in range(500)
    ]
    links = {o.trial_id: f"#/experiments/1/runs/{'0' * 32}" for o in trials}
    note = mlflow_note.note(
        SPEC, trials, front(trials), links, headline="h" * 900, view="#/view", commands=["mlflow ui"]
    )
    assert len(note) <= 8000
    assert note.count("| [") == 15
    assert "… and 235 more: frontier.json" in note
    assert "250 of 500 trials did not complete" in note
    assert note.endswith("```\nmlflow ui\n```")
