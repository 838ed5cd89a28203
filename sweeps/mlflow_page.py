"""The page of a sweep as it opens in MLflow: charts, columns, filter and sort, in MLflow 3.17's undocumented format."""

from __future__ import annotations

import base64
import itertools
import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sweeps.mlflow_view import RANK, TRAIN_CURVES, final_metrics, metric_key, params, varying
from sweeps.outcome import TrialOutcome
from sweeps.spec import SweepSpec

# A key that a later version does not know is ignored.
# fmt: off
_PAGE = {  # what is the same for every sweep
    "orderByKey": f"metrics.`{RANK}`", "orderByAsc": True, "startTime": "ALL", "lifecycleFilter": "Active",
    "datasetsFilter": [], "modelVersionFilter": "All Runs", "columnOrder": [], "columnWidths": {}, "groupBy": None,
    "runsHiddenMode": "SHOW_ALL", "groupsExpanded": {}, "viewMaximized": False, "runListHidden": False,
    "isAccordionReordered": True, "hideEmptyCharts": True, "useGroupedValuesInCharts": True, "chartsSearchFilter": "",
    "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
}
_SECTIONS = (("tradeoffs", "Trade-offs", 3), ("settings", "Settings and outcomes", 1), ("curves", "Curves", 2))
_SECTION = {"display": True, "isReordered": False, "deleted": False, "isGenerated": False, "cardHeight": 400}
_LINE = {
    "lineSmoothness": 0, "xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear",
    "selectedXAxisMetricKey": "", "range": {}, "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
    "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True,
}
# fmt: on


def saved_view(spec: SweepSpec, sweep: str, outcomes: Sequence[TrialOutcome], created_at: int) -> str:
    """Return the value of an experiment tag `mlflow.sharedViewState.<id>`: charts, columns, filter and sort."""
    keys = {r.key for o in outcomes for r in final_metrics(o, spec.objectives)} | set(TRAIN_CURVES if outcomes else ())
    # Parallel coordinates show only runs that have all that is asked for, and some axes belong to one strategy.
    logged = [params(o) for o in outcomes]
    shared = [name for name in varying(spec) if all(name in those for those in logged)]
    state = json.dumps(view_state(spec, sweep, keys, shared), separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(state.encode(), 9)).decode()
    return json.dumps({"name": sweep, "createdAt": created_at, "state": f"deflate;{packed}"})


def view_state(spec: SweepSpec, sweep: str, metric_keys: Iterable[str], shared: Sequence[str]) -> dict[str, Any]:
    """Return the page's state.

    `metric_keys`: all that exist, each of which would get a chart of its own; `shared`: the axes that all trials have.
    """
    objectives = [metric_key(name) for name in spec.objectives]
    columns = [f"metrics.`{key}`" for key in (RANK, *objectives)] + [f"params.`{key}`" for key in varying(spec)[:10]]
    charts = list(_charts(sweep, objectives, shared[:8]))
    for key in sorted({RANK, *metric_keys} - {c.get("metricKey") for c in charts}):
        charts.append(_chart(sweep, f"hidden {key}", "BAR", "tradeoffs", metricKey=key, deleted=True, isGenerated=True))
    sections = [{"uuid": _uuid(sweep, key), "name": name, "columns": n, **_SECTION} for key, name, n in _SECTIONS]
    return {
        **_PAGE,
        "searchFilter": f"tags.sweep.role = 'trial' and tags.sweep.id = '{sweep}'",
        "selectedColumns": [
            *columns,
            "tags.`trial.status`",
            "tags.`trial.kind`",
            "tags.`trial.reason`",
            "tags.`parity.verdict`",
        ],
        "compareRunCharts": charts,
        "compareRunSections": sections,
    }


def _charts(sweep: str, objectives: Sequence[str], settings: Sequence[str]) -> Iterator[dict[str, Any]]:
    for x, y in itertools.islice(itertools.combinations(objectives, 2), 6):
        axes = {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
        yield _chart(sweep, f"{x} {y}", "SCATTER", "tradeoffs", **axes)
    shown = {"selectedParams": list(settings), "selectedMetrics": list(objectives), "showAllRuns": False}
    yield _chart(sweep, "parallel", "PARALLEL", "settings", **shown)
    for key in ("eval/loss", "train/loss"):
        yield _chart(sweep, key, "LINE", "curves", metricKey=key, selectedMetricKeys=[key], **_LINE)


def _chart(sweep: str, name: str, kind: str, section: str, **fields: Any) -> dict[str, Any]:
    ids = {"uuid": _uuid(sweep, name), "type": kind, "metricSectionId": _uuid(sweep, section)}
    return {**ids, "runsCountToCompare": 100, "deleted": False, "isGenerated": False, **fields}


def _uuid(sweep: str, name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{sweep}/{name}"))
