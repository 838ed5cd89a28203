"""The command line of the main job: `python sweeps/run.py space=lora_small [key=value …]`."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# As a script this file's folder is first on the path, where its neighbours' names could hide other packages.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from sweeps import signals, space
from sweeps.journal import Journal
from sweeps.objectives import OBJECTIVES
from sweeps.search import SEARCHERS
from sweeps.spec import SweepSpec, keys
from sweeps.usage import described, wrapped
from trainers.errors import UserError

# What a resumed sweep may be given anew: how much to spend and where to run, never what is measured.
RESUMABLE = (
    "budget.trials",
    "budget.minutes",
    "budget.gpu_hours",
    "confirm",
    "least_gain",
    "launcher",
    "ray.max_concurrent_trials",
    "trial_timeout_minutes",
)
REGISTERED: Mapping[str, Collection[str]] = {"searcher": list(SEARCHERS), "objectives": list(OBJECTIVES)}
EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str]) -> int:
    """Run a sweep; return the exit status: 0 done, 1 no trial completed, 2 bad input, 130 interrupted."""
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print(usage())
        return 0 if arguments else EXIT_BAD_INPUT
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries to their authors
    try:
        with signals.handled():
            spec, journal = read_command(arguments)
            return run(spec, journal)
    except UserError as error:
        print("\n".join(f"error: {fault}" for fault in error.faults), file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        sweep = not any(word.lower().startswith("plan=t") for word in arguments)
        more = "; if a sweep had begun, resume=latest goes on with it" if sweep else ""
        print(f"\ninterrupted{more}", file=sys.stderr)
        return EXIT_INTERRUPTED


def run(spec: SweepSpec, journal: Journal | None) -> int:
    """Run the sweep with a screen and print its report."""
    if spec.plan:
        return plan_only(spec, journal)
    from sweeps.printed import print_report
    from sweeps.screen import TerminalScreen
    from sweeps.sweep import run_sweep

    screen = TerminalScreen(spec)
    try:
        report = run_sweep(spec, screen, journal)
    finally:
        screen.close()
    print_report(report, resume_command(report.sweep_id, report.folder, spec, report.spent))
    if report.ended == "interrupted":
        return EXIT_INTERRUPTED
    return EXIT_FAILED if report.outcomes and not any(o.status == "COMPLETED" for o in report.outcomes) else 0


def plan_only(spec: SweepSpec, journal: Journal | None) -> int:
    """Predict every candidate, print the table and write the predictions."""
    from sweeps.plan import make_plan
    from sweeps.plan_printed import print_plan

    if journal is not None:
        raise UserError("plan=true predicts a space: give space=…, not resume=…")

    def told(what: str, done: int, of: int) -> None:
        print(f"\r{what}: {done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)

    print_plan(make_plan(spec, told))
    return 0


def resume_command(sweep_id: str, folder: Path, spec: SweepSpec, spent: str | None) -> str:
    """Return the command that goes on with a sweep, with what was changed for it; a budget that is spent is asked for.

    `spent`: the key of that budget.
    """
    before, now = (flat(s) for s in (space.validate(Journal(folder).spec_tree(), Path.cwd(), {}), spec))
    words = ["python", sys.argv[0]]
    if folder.parent != Path.cwd() / "runs":
        words.append(f"runs_dir={folder.parent}")
    words.append(f"resume={sweep_id}")
    words += [f"{k}={'null' if now[k] is None else now[k]}" for k in RESUMABLE if now[k] != before[k] and k != spent]
    return shlex.join(words) + (f" {spent}=…" if spent else "")


def read_command(arguments: Sequence[str]) -> tuple[SweepSpec, Journal | None]:
    """Return the spec of a command, and the journal of the sweep that it resumes."""
    overrides = space.parse_overrides(arguments)
    if "resume" in overrides and overrides["resume"] is None:
        raise UserError("resume= has no value; give latest or a sweep's id")
    resume = overrides.pop("resume", None)
    name = overrides.pop("space", None)
    if resume is not None:
        return read_resumed(str(resume), name, overrides)
    if name is None:
        raise UserError(f"space=… is missing; available: {', '.join(space.shipped())}")
    return space.load(str(name), overrides), None


def read_resumed(resume: str, name: str | None, overrides: Mapping[str, Any]) -> tuple[SweepSpec, Journal]:
    """Return the spec that a sweep was started with, with what may change changed, and its journal."""
    runs = Path(str(overrides.get("runs_dir", "runs"))).expanduser().resolve()
    journal = Journal.find(resume, runs).open()
    tree = journal.spec_tree()
    if name is not None and name not in (tree["space"], f"{tree['space']}.yaml") and Path(name).stem != tree["space"]:
        raise UserError(f"resume={resume}: {journal.sweep_id} is a sweep of space={tree['space']}, not of {name}")
    started = space.validate(tree, base=Path.cwd(), given={})
    for key, value in overrides.items():
        if key != "runs_dir":
            assign(tree, key, value)  # not space.apply: the stored spec is resolved, and its text is meant literally
    changed = space.validate(tree, base=Path.cwd(), given=overrides)
    before, after = flat(started), flat(changed)
    different = [k for k in after if before[k] != after[k] and k not in RESUMABLE]
    if different:
        raise UserError(
            [
                f"{k}={after[k]} differs from {before[k]}, with which {journal.sweep_id} was started; its trials "
                f"could not be compared. Start a new sweep, or change only {', '.join(RESUMABLE)}"
                for k in different
            ]
        )
    return changed.model_copy(update={"runs_dir": str(journal.folder.parent)}), journal


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dicts."""
    *sections, leaf = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        tree = inner if isinstance(inner, dict) else tree
    tree[leaf] = value


def flat(spec: SweepSpec) -> dict[str, Any]:
    """Return a spec with dotted keys."""
    found: dict[str, Any] = {}

    def walk(prefix: str, tree: Mapping[str, Any]) -> None:
        for key, value in tree.items():
            if isinstance(value, dict) and f"{prefix}{key}" not in known:
                walk(f"{prefix}{key}.", value)
            else:
                found[f"{prefix}{key}"] = value

    known = keys()
    walk("", spec.model_dump(mode="json"))
    return found


def usage() -> str:
    """Return the help text: spaces, keys, types, defaults."""
    lines = [
        "usage: python sweeps/run.py space=NAME [key=value …]",
        "",
        "spaces that ship (or give the path of a .yaml file):",
    ]
    for name, path in space.shipped().items():
        lines.append(f"  {name:20} {headline(path)}")
    lines += ["", "keys (lists are tried value by value: system.micro_batch_size=[1,2,4]):"]
    lines += ["  space: the space's name or path"]
    lines += described({key: of for key, of in keys().items() if key != "space"}, REGISTERED)
    lines += ["  resume: latest or a sweep's id", *wrapped(f"continue a sweep; may change {', '.join(RESUMABLE)}")]
    lines += ["", "exit status: 0; 1 no trial completed (out of memory, too); 2 bad input; 130 interrupted"]
    return "\n".join(lines)


def headline(path: Path) -> str:
    """Return the first comment line of a space file."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
