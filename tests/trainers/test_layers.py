"""The layers that trainers promise: what may be imported, where, and what each strategy fulfils."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import trainers
from trainers import strategies
from trainers.config import LearningConfig, SystemConfig
from trainers.strategies import DIMENSIONS, STRATEGIES, Setting, Strategy

MODULES = sorted(m.name for m in pkgutil.walk_packages(trainers.__path__, "trainers.") if m.name != "trainers.worker")
NOT_NEEDED = ("ray", "mlflow", "pydantic", "omegaconf", "rich", "optuna", "sweeps")
HEAVY = ("torch", "peft", "transformers", "deepspeed", "numpy")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_trainers_start_where_only_torch_transformers_and_peft_are_installed() -> None:
    assert len(MODULES) > 20
    run(
        "import importlib, sys\n"
        f"for name in {NOT_NEEDED}: sys.modules[name] = None\n"
        f"for name in {MODULES}: importlib.import_module(name)\n"
        "from trainers.embedded import model\n"
        "import torch, peft; model.load(torch.float32, 'sdpa')"
    )


@pytest.mark.parametrize(
    "names",
    ["trainers.strategies", "trainers.shape", "trainers.plan, trainers.batch", "trainers.config, trainers.rows"],
)
def test_legality_needs_no_heavy_library(names: str) -> None:
    loaded = run(
        f"import sys, {names}\n"
        "from trainers.strategies import STRATEGIES; list(STRATEGIES)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert loaded == "[]"


def test_every_module_of_the_folder_registers_a_strategy_or_a_dimension() -> None:
    members = [*(STRATEGIES[name] for name in STRATEGIES), *(DIMENSIONS[name] for name in DIMENSIONS)]
    homes = {type(member).__module__ for member in members}
    assert homes == {f"{strategies.__name__}.{m.name}" for m in pkgutil.iter_modules(strategies.__path__)}


@pytest.fixture(params=sorted(STRATEGIES))
def strategy(request: pytest.FixtureRequest) -> tuple[str, Strategy]:
    return request.param, STRATEGIES[request.param]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8])
def test_a_strategy_plans_all_its_workers(strategy: tuple[str, Strategy], num_workers: int) -> None:
    name, member = strategy
    options = {option.name: option.default for option in member.options}
    system = SystemConfig(strategy=name, num_workers=num_workers, options=options)
    plan = member.plan(system)
    assert plan.world == num_workers
    assert {plan.dp_rank(rank) for rank in range(num_workers)} == set(range(plan.dp))
    assert plan.accumulation(plan.dp * 2 * 3, 2) == 3
    with pytest.raises(ValueError, match="not divisible"):
        plan.accumulation(plan.dp * 2 * 3 + 1, 2)
    setting = Setting(LearningConfig(), system, plan, None, "cpu")
    assert plan.dp % member.gradient_divisor(setting) == 0
    assert all(isinstance(reason, str) for reason in member.validate(setting))


def test_options_have_a_default_among_their_choices(strategy: tuple[str, Strategy]) -> None:
    for option in strategy[1].options:
        assert isinstance(option.default, option.type)
        assert option.help
        assert not option.choices or option.default in option.choices
