"""The enumerated space, counted and divided by hand."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sweeps import candidates as candidates_module
from sweeps import spec as spec_module
from sweeps.candidates import (
    Candidate,
    baseline_of,
    enumerate_candidates,
    pruned_rules,
    trial_tree,
    varying,
)
from sweeps.spec import SweepSpec, axes
from tests.sweeps.factories import CONDITIONAL, make_candidates, make_context, make_spec
from trainers.config import LearningConfig, SystemConfig, TrialConfig, from_tree, to_tree
from trainers.errors import UserError
from trainers.plan import Plan
from trainers.shape import ModelShape
from trainers.strategies import STRATEGIES, Option, Strategy
from trainers.strategies.ddp import DDP

LORA = {"lora_rank", "lora_alpha", "lora_dropout", "lora_targets"}


def learning_of(found: list[Candidate], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(c.learning.get(n) for n in names) for c in found]


# -- conditional axes ---------------------------------------------------------------------------------------------


def test_lora_rank_multiplies_only_lora() -> None:
    tree = {"learning": {"adapter": ["full", "lora"], "lora_rank": ["4", "8"], "learning_rate": ["1e-4", "1e-3"]}}
    found = make_candidates(tree)
    # full: 2 learning rates; lora: 2 ranks × 2 learning rates.
    assert learning_of(found, "adapter", "lora_rank", "learning_rate") == [
        ("full", None, 1e-4),
        ("full", None, 1e-3),
        ("lora", 4, 1e-4),
        ("lora", 4, 1e-3),
        ("lora", 8, 1e-4),
        ("lora", 8, 1e-3),
    ]


def test_a_conditional_axis_that_does_not_apply_is_absent() -> None:
    spec = make_spec(CONDITIONAL)
    for candidate in enumerate_candidates(spec, make_context()):
        expected = LORA if candidate.learning["adapter"] == "lora" else set()
        tree = trial_tree(spec, candidate, "cpu", None)
        assert LORA & set(candidate.flat) == expected
        assert LORA & set(tree["learning"]) == expected
        assert LORA & set(to_tree(from_tree(TrialConfig, tree))["learning"]) == expected


class Zero(Strategy):
    """A strategy with an option of its own; its ranks are laid out like DDP's."""

    options = (Option("zero_stage", int, 1, "what is sharded", choices=(1, 2, 3)),)

    def plan(self, system: SystemConfig) -> Plan:
        return Plan(dp_shard=system.num_workers)

    def apply(self, model: Any, world: Any) -> Any:
        raise AssertionError("nothing is wrapped here")

    def accumulating(self, wrapped: Any, setting: Any, last: bool) -> AbstractContextManager[None]:
        raise AssertionError("nothing is trained here")

    def gradient_divisor(self, plan: Plan) -> int:
        return plan.dp


@pytest.fixture
def zero_spec(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from system axes to a spec, where the strategies are ddp and the Zero above."""
    len(STRATEGIES)  # discovered before its members are replaced
    monkeypatch.setattr(STRATEGIES, "_members", {"ddp": DDP(), "zero": Zero()})
    axes.cache_clear()
    system_axes = spec_module._axes_model("SystemAxes", SystemConfig, "")

    def build(**system: Any) -> SweepSpec:
        return make_spec().model_copy(update={"system": system_axes.model_validate(system)})

    yield build
    axes.cache_clear()


def test_zero_stage_exists_only_with_zero(zero_spec: Any) -> None:
    spec = zero_spec(strategy=["ddp", "zero"], zero_stage=["1", "3"], micro_batch_size=["1", "2"])
    found = enumerate_candidates(spec, make_context())
    assert [(c.system["strategy"], c.flat.get("zero_stage")) for c in found if c.system["micro_batch_size"] == 1] == [
        ("ddp", None),
        ("zero", 1),
        ("zero", 3),
    ]
    assert len(found) == 6
    for candidate in found:
        tree = trial_tree(spec, candidate, "cpu", None)
        config = from_tree(TrialConfig, tree)
        is_zero = candidate.system["strategy"] == "zero"
        assert ("zero_stage" in candidate.flat, "zero_stage" in tree["system"]) == (is_zero, is_zero)
        assert config.system.options == ({"zero_stage": candidate.flat["zero_stage"]} if is_zero else {})
        assert to_tree(config)["system"] == tree["system"]


# -- accumulation is derived, never rounded -------------------------------------------------------------------------


def test_accumulation_is_derived() -> None:
    tree = {
        "learning": {"global_batch_size": "16"},
        "system": {"num_workers": ["1", "2", "4"], "micro_batch_size": ["1", "4"]},
    }
    found = {
        (c.num_workers, c.system["micro_batch_size"]): c.gradient_accumulation_steps for c in make_candidates(tree)
    }
    assert found == {(1, 1): 16, (1, 4): 4, (2, 1): 8, (2, 4): 2, (4, 1): 4, (4, 4): 1}


def test_what_does_not_divide_is_pruned_with_every_factor() -> None:
    tree = {
        "learning": {"global_batch_size": ["8", "12"]},
        "system": {"num_workers": "2", "micro_batch_size": ["3", "4"]},
    }
    found = make_candidates(tree)
    # 8 / (3 · 2) and 12 / (4 · 2) leave a remainder; 8 / (4 · 2) = 1 and 12 / (3 · 2) = 2 do not.
    assert [(c.legal, c.gradient_accumulation_steps) for c in found] == [
        (False, None),
        (True, 1),
        (True, 2),
        (False, None),
    ]
    for candidate in found:
        if not candidate.legal:
            (reason,) = candidate.reasons
            assert f"global_batch_size={candidate.learning['global_batch_size']}" in reason
            assert f"micro_batch_size={candidate.system['micro_batch_size']} × dp=2" in reason
            assert "dp_replicate=2 × dp_shard=1" in reason


def test_a_micro_batch_over_the_global_batch_is_pruned() -> None:
    (only,) = make_candidates({"learning": {"global_batch_size": "2"}, "system": {"micro_batch_size": "4"}})
    assert not only.legal


def test_nothing_is_dropped() -> None:
    values = {"num_workers": [1, 2, 3], "micro_batch_size": [1, 2, 4]}
    learning = {"global_batch_size": [6, 8], "seed": [0, 1]}
    text = {"learning": {k: [str(x) for x in v] for k, v in learning.items()}}
    found = make_candidates({**text, "system": {k: [str(x) for x in v] for k, v in values.items()}})
    product = list(itertools.product(learning["global_batch_size"], learning["seed"], *values.values()))
    assert len(found) == len(product) == 36
    legal = [(b, s, n, m) for b, s, n, m in product if b % (n * m) == 0]
    assert [
        (c.flat["global_batch_size"], c.flat["seed"], c.flat["num_workers"], c.flat["micro_batch_size"])
        for c in found
        if c.legal
    ] == legal
    assert sum(pruned_rules(found).values()) == 36 - len(legal)


# -- identity -------------------------------------------------------------------------------------------------------


def identify(learning: dict[str, Any], system: dict[str, Any]) -> str:
    candidate = candidates_module._candidate("embedded", learning, system, make_context())
    return candidate.id


def test_ids_are_stable() -> None:
    """A resumed sweep finds its finished candidates by these."""
    learning = {"learning_rate": 1e-4, "global_batch_size": 16, "seq_len": 128}
    # printf '{"learning": {"global_batch_size": 16, "learning_rate": 0.0001, "seq_len": 128}, "model": "embedded",
    # "system": {"micro_batch_size": 2, "num_workers": 1, "strategy": "ddp"}}' | sha256sum | head -c 10 (on one line)
    assert identify(learning, {"strategy": "ddp", "num_workers": 1, "micro_batch_size": 2}) == "7759242680"
    assert identify(learning, {"strategy": "ddp", "num_workers": 2, "micro_batch_size": 2}) == "f92091fc79"


def test_ids_do_not_depend_on_the_order_of_keys() -> None:
    learning = {"learning_rate": 1e-4, "global_batch_size": 16, "seq_len": 128}
    system = {"strategy": "ddp", "num_workers": 1, "micro_batch_size": 2}
    turned = identify(dict(reversed(learning.items())), dict(reversed(system.items())))
    assert turned == identify(learning, system)
    one = {"learning": {"seed": "1", "learning_rate": ["1e-4", "1e-3"]}, "system": {"micro_batch_size": ["1", "2"]}}
    other = {"system": dict(one["system"]), "learning": dict(reversed(one["learning"].items()))}
    assert [c.id for c in make_candidates(one)] == [c.id for c in make_candidates(other)]


def test_ids_differ_where_values_do() -> None:
    found = make_candidates(CONDITIONAL)
    other_model = make_candidates({**CONDITIONAL, "model": "org/name"})
    assert len({c.id for c in (*found, *other_model)}) == 2 * len(found) == 24
    for candidate in found:
        text = json.dumps(
            {"model": "embedded", "learning": candidate.learning, "system": candidate.system}, sort_keys=True
        )
        assert candidate.id == hashlib.sha256(text.encode()).hexdigest()[:10]


def test_a_value_given_twice_is_one_candidate() -> None:
    tree = {"learning": {"learning_rate": ["1e-4", "0.0001", "1.0e-4"], "adapter": ["lora", "lora"]}}
    assert learning_of(make_candidates(tree), "learning_rate", "adapter") == [(1e-4, "lora")]


def test_varying_axes() -> None:
    found = make_candidates(CONDITIONAL)
    # lora_alpha and others exist in some candidates only, but with one value: that is said by adapter=lora.
    several = {name for name in LORA if len({c.learning[name] for c in found if name in c.learning}) > 1}
    assert several == {"lora_rank"}
    assert set(varying(found)) == {"adapter", "learning_rate", "micro_batch_size", "lora_rank"}
    assert varying(found[:1]) == []


# -- the trial's config ---------------------------------------------------------------------------------------------


def test_the_trial_is_given_what_was_sampled() -> None:
    spec = make_spec(
        {
            "data": "embedded",
            "eval_fraction": "0.2",
            "epochs": "3",
            "budget": {"tokens_per_trial": "5000"},
            "eval_every_tokens": "700",
            "learning": {"learning_rate": ["1e-5", "1e-2"], "lora_rank": "4"},
            "system": {"micro_batch_size": "2"},
        }
    )
    trees = [trial_tree(spec, c, "cpu", target=1.5) for c in enumerate_candidates(spec, make_context())]
    configs = [from_tree(TrialConfig, tree) for tree in trees]
    assert [c.learning.learning_rate for c in configs] == [1e-5, 1e-2]
    for config in configs:
        assert (config.learning.lora_rank, config.system.micro_batch_size, config.eval_fraction) == (4, 2, 0.2)
        run = config.run
        assert (run.device, run.max_tokens, run.epochs, run.eval_every_tokens) == ("cpu", 5000, 3, 700)
        assert run.target_eval_loss == 1.5


# -- rules beside arithmetic ----------------------------------------------------------------------------------------


def test_flash_attention_is_pruned_on_cpu() -> None:
    found = make_candidates({"system": {"attn_implementation": ["sdpa", "flash_attention_2"]}}, make_context("cpu"))
    assert [c.legal for c in found] == [True, False]
    assert "attn_implementation=flash_attention_2 needs CUDA; this runs on cpu" in found[1].reasons[0]


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_needs_its_package(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    (only,) = make_candidates({"system": {"attn_implementation": "flash_attention_2"}}, make_context("cuda"))
    assert only.legal == installed
    assert all("flash-attn, which is not installed" in reason for reason in only.reasons)


def test_flash_attention_is_pruned_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    tree = {
        "learning": {"param_dtype": ["bfloat16", "float32"]},
        "system": {"attn_implementation": "flash_attention_2"},
    }
    found = make_candidates(tree, make_context("cuda"))
    assert [c.legal for c in found] == [True, False]
    assert "not with param_dtype=float32" in found[1].reasons[0]


@pytest.mark.parametrize(
    ("targets", "unknown"),
    [
        ("all-linear", None),
        ("q_proj, v_proj", None),
        ("self_attn.q_proj,lm_head", None),
        ("q_proj,c_attn", "'c_attn'"),
        ("mlp.qproj", "'mlp.qproj'"),
    ],
)
def test_lora_targets_are_layers_of_the_model(targets: str, unknown: str | None) -> None:
    (only,) = make_candidates({"learning": {"lora_targets": targets}}, make_context(shape=shape(512)))
    assert only.legal == (unknown is None)
    if unknown:
        assert unknown in only.reasons[0]


def shape(positions: int) -> ModelShape:
    return ModelShape(
        name="tiny",
        model_type="llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


def test_a_sequence_longer_than_the_model_is_pruned() -> None:
    tree = {"learning": {"seq_len": ["512", "513"]}}
    found = make_candidates(tree, make_context(positions=512))
    assert [c.legal for c in found] == [True, False]
    assert found[1].reasons == ("seq_len=513 is longer than the model's 512 positions",)


def test_inline_runs_one_worker() -> None:
    found = make_candidates({"system": {"num_workers": ["1", "2"]}}, make_context(launcher="inline"))
    assert [c.legal for c in found] == [True, False]
    assert found[1].reasons[0].startswith("num_workers=2: launcher=inline")


def test_every_rule_is_told_at_once() -> None:
    tree = {
        "learning": {"seq_len": "1024", "global_batch_size": "5"},
        "system": {"num_workers": "2", "attn_implementation": "flash_attention_2"},
    }
    (only,) = make_candidates(tree, make_context(positions=512, launcher="inline"))
    assert len(only.reasons) == 4
    assert pruned_rules([only, only]) == dict.fromkeys(only.reasons, 2)


def test_the_axes_are_the_fields_of_the_trainers_configs() -> None:
    names = {a.name for config in (LearningConfig, SystemConfig) for a in axes(config)}
    assert names >= {"adapter", "lora_rank", "learning_rate", "global_batch_size", "strategy", "micro_batch_size"}
    assert len(names) == len(axes(LearningConfig)) + len(axes(SystemConfig))  # one flat name each
    assert math.prod(len(v) for v in make_spec().learning.values().values()) == 1
    assert make_spec().runs_dir == str(Path.cwd() / "runs")


def test_a_baseline_is_the_candidate_that_a_jobs_file_describes(tmp_path: Path) -> None:
    """Of the space it is the same one; beside it one more; what is illegal or no job's file is said by its file."""
    tree = {"learning": {"global_batch_size": 4}, "system": {"micro_batch_size": ["1", "2"]}}
    context = make_context(workers=2)
    path = tmp_path / "now.yaml"
    path.write_text("learning: {global_batch_size: 4}\nsystem: {micro_batch_size: 2}\n")
    spec = make_spec({**tree, "baseline": str(path)})
    found = baseline_of(spec, context)
    assert found == make_candidates(tree)[1]
    path.write_text("learning: {global_batch_size: 8}\nsystem: {strategy: fsdp2, num_workers: 2}\n")
    other = baseline_of(spec, context)
    assert other is not None
    assert other.id not in {c.id for c in make_candidates(tree)}
    for text, said in (
        ("system: {micro_batch_size: 3}\nlearning: {global_batch_size: 4}", "is not divisible"),
        ("system: {num_workers: 4}\nlearning: {global_batch_size: 4}", "the cluster has room for 2"),
        ("system: {stratgy: ddp}", "did you mean system.strategy"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"baseline=.*{said}"):
            baseline_of(spec, context)
    with pytest.raises(UserError, match=r"baseline=nowhere\.yaml: there is no such file"):
        baseline_of(make_spec({**tree, "baseline": "nowhere.yaml"}), context)
