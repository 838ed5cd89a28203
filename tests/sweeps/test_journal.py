"""The folder of a sweep: what is written comes back, whatever ended the process."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sweeps import space
from sweeps.journal import Journal, check_writable
from tests.sweeps.factories import evaluations, make_candidates, make_outcome, make_result, make_spec, make_update
from trainers.errors import UserError


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(make_spec({"runs_dir": str(tmp_path / "runs")}))


def named(runs: Path, name: str, age_s: float) -> Path:
    """Make the folder of a sweep whose spec was written `age_s` ago."""
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text("space: test\n", encoding="utf-8")
    os.utime(folder / "spec.yaml", (1e9 - age_s, 1e9 - age_s))
    return folder


def faults(error: pytest.ExceptionInfo[UserError]) -> str:
    """Return the one fault of an error."""
    (only,) = error.value.faults
    return only


def test_outcomes_come_back_equal(journal: Journal) -> None:
    measured = make_result(evaluations((0, 4.0), (10, 3.0)), [make_update(0.5)], stop_reason="target")
    result = json.loads(json.dumps(measured.to_json()))
    written = [
        make_outcome("c0", "000", metrics={"peak_memory_gib": 0.1 + 0.2, "eval_loss": 1e-300}, result=result),
        make_outcome("c1", "001", "OOM", reason_kind="device_oom", reason="“测试”\nrank 1", phase="backward", rank=1),
        make_outcome("c2", "002", "FAILED", reason_kind="crash", traceback='File "x"\r\n\u2028end', attempt=2),
    ]
    for outcome in written:
        journal.append(outcome)
    assert Journal(journal.folder).read() == written == journal.outcomes
    assert Journal(journal.folder).read()[0].measured == measured


def test_a_loss_that_is_not_finite_comes_back_as_one(journal: Journal) -> None:
    result = make_result(
        evaluations((0, 4.0), (10, math.inf)), [make_update(0.5, loss=math.nan, grad_norm=math.inf)], stop_reason="nan"
    )
    journal.append(make_outcome(status="STOPPED", reason_kind="nan", result=result.to_json()))

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(journal.trials.read_text(encoding="utf-8"), parse_constant=refuse)
    (back,) = Journal(journal.folder).read()
    assert back.measured is not None
    assert [math.isfinite(e.loss) for e in back.measured.evaluations] == [True, False]
    assert not math.isfinite(back.measured.updates[0].loss)
    assert not math.isfinite(back.measured.updates[0].grad_norm)
    assert back.measured.updates[0].step_time_s == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_hold_finite_numbers_only(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        make_outcome(metrics={"eval_loss": value})


def test_a_line_that_was_cut_off_is_dropped(journal: Journal) -> None:
    first, second = make_outcome("c0", "000"), make_outcome("c1", "001")
    journal.append(first)
    whole = journal.trials.read_bytes()
    journal.trials.write_bytes(whole + second.to_line().encode()[:-20])
    assert Journal(journal.folder).read() == [first]
    assert journal.trials.read_bytes() != whole  # reading changes nothing: the file may be another process's
    journal.close()
    resumed = Journal(journal.folder).open()
    assert resumed.read() == [first]
    assert journal.trials.read_bytes() == whole
    resumed.append(second)  # on a line of its own
    assert Journal(journal.folder).read() == [first, second]


def test_a_broken_line_is_named(journal: Journal) -> None:
    journal.append(make_outcome("c0", "000"))
    with journal.trials.open("a", encoding="utf-8") as file:
        file.write('{"schema": 1}\n')
    with pytest.raises(UserError, match=r"trials\.jsonl line 2 is not a trial outcome") as error:
        Journal(journal.folder).read()
    faults(error)


def test_numbering(tmp_path: Path) -> None:
    spec = make_spec({"runs_dir": str(tmp_path / "a folder" / "runs")})
    names = [Journal.create(spec).sweep_id for _ in range(3)]
    matches = [re.fullmatch(r"test-(\d{8})-(\d+)", name) for name in names]
    assert [m and m[2] for m in matches] == ["1", "2", "3"]
    other = make_spec({"space": "other", "runs_dir": spec.runs_dir})
    assert Journal.create(other).sweep_id.endswith("-1")


def test_the_spec_comes_back_equal(tmp_path: Path) -> None:
    spec = make_spec(
        {"runs_dir": str(tmp_path), "run_name": "no", "learning": {"learning_rate": ["1e-4"]}, "env": {"A": "010"}}
    )
    journal = Journal.create(spec)
    assert space.validate(journal.spec_tree(), base=tmp_path, given={}) == spec


def test_find(tmp_path: Path) -> None:
    named(tmp_path, "test-20250101-1", age_s=300)
    newest = named(tmp_path, "test-20241231-9", age_s=100)
    named(tmp_path, "other-20250101-1", age_s=200)
    (tmp_path / "test-20250102-1").mkdir()  # died before its spec was written: not a sweep
    assert Journal.find("latest", tmp_path).folder == newest
    found = Journal.find("test-20250101-1", tmp_path)
    assert (found.sweep_id, found.outcomes, found.spec_tree()) == ("test-20250101-1", [], {"space": "test"})
    with pytest.raises(UserError) as error:
        Journal.find("test-20250101-2", tmp_path)
    assert "did you mean test-20250101-1?" in faults(error)
    assert "other-20250101-1, test-20241231-9, test-20250101-1" in faults(error)


def test_found_with_its_outcomes(journal: Journal) -> None:
    journal.append(make_outcome())
    journal.close()
    assert Journal.find("latest", journal.folder.parent).open().outcomes == [make_outcome()]


def test_find_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no sweeps in"):
        Journal.find("latest", tmp_path / "absent")


def test_json_appears_whole_or_not_at_all(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    target = journal.folder / "frontier.json"
    journal.write_json("frontier.json", {"n": 1})
    seen: list[tuple[Any, Any]] = []
    rename = Path.replace

    def watch(self: Path, to: Path) -> Path:
        seen.append((json.loads(target.read_text(encoding="utf-8")), json.loads(self.read_text(encoding="utf-8"))))
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", watch)
    journal.write_json("frontier.json", {"n": 2})
    assert seen == [({"n": 1}, {"n": 2})]  # up to the rename the old file is whole, and the new one too
    assert json.loads(target.read_text(encoding="utf-8")) == {"n": 2}
    with pytest.raises(ValueError, match="not JSON compliant"):
        journal.write_json("frontier.json", {"n": math.nan})
    assert json.loads(target.read_text(encoding="utf-8")) == {"n": 2}
    assert sorted(p.name for p in journal.folder.iterdir()) == [".lock", "frontier.json", "spec.yaml"]


def test_candidates_are_written_with_their_states(journal: Journal) -> None:
    one, two, pruned = make_candidates({"system": {"micro_batch_size": ["1", "2", "3"]}})
    journal.write_candidates([one, two, pruned], {one.id: "OOM"})
    lines = [json.loads(line) for line in (journal.folder / "candidates.jsonl").read_text("utf-8").splitlines()]
    assert [(c["id"], c["state"], c["gradient_accumulation_steps"]) for c in lines] == [
        (one.id, "OOM", 16),
        (two.id, "untried", 8),
        (pruned.id, "pruned", None),
    ]
    assert "16 is not divisible by micro_batch_size=3" in lines[2]["reasons"][0]
    assert lines[0]["config"]["micro_batch_size"] == 1


def test_a_folder_that_could_be_made_is_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_under_a_file_is_not_writable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    for runs in (file, file / "runs", file / "a" / "b"):
        with pytest.raises(UserError, match=f"cannot write to {re.escape(str(file))}") as error:
            check_writable(runs)
        assert "runs_dir=" in faults(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_without_permission_is_not_writable(tmp_path: Path, mode: int) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=mode)
    with pytest.raises(UserError, match="cannot write to"):
        check_writable(closed / "a" / "runs")
