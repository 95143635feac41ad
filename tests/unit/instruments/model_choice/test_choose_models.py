"""Which target, format and draft are chosen for a given memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipespec.engine.checkpoint.inspection import inspect
from pipespec.errors import ConfigError
from pipespec.instruments.model_choice.candidates import Candidate
from pipespec.instruments.model_choice.choose_models import Choice, Chooser
from pipespec.instruments.model_choice.fitting import USABLE_SHARE, Fit, fit
from pipespec.instruments.model_choice.given_settings import given
from pipespec.system.folders import resource_dir

DEMO = resource_dir("demo")
TARGET, MID, DRAFT, PARALLEL = (
    Candidate(name, inspect(DEMO / name)) for name in ("target", "mid", "draft", "draft_pard")
)
CONTEXT = 512
PLENTY = 2**40
PAIR = (
    f"model.target={DEMO / 'target'}",
    f"model.draft={DEMO / 'draft'}",
    f"model.context={CONTEXT}",
    "cluster.stages=1",
)


def needed(*settings: str, **hosts: dict[str, int]) -> int:
    """Bytes that a cluster of these settings lacks on its fullest device; of a machine without
    memory, that it needs."""
    return fit((), settings, hosts or {"local": {"cpu": 0}}).missing_bytes


def free(num_bytes: int) -> dict[str, int]:
    """The memory of a host of which a cluster may use so many bytes."""
    return {"cpu": int(num_bytes / USABLE_SHARE) + 2}


def choose(
    models: Sequence[Candidate], num_bytes: int = PLENTY, *settings: str, **hosts: dict[str, int]
) -> Choice | Fit:
    memory = hosts or {"local": free(num_bytes)}
    return Chooser(models, given(settings), memory, CONTEXT).choose()


def chosen(*args: object, **hosts: dict[str, int]) -> Choice:
    found = choose(*args, **hosts)  # type: ignore[arg-type]
    assert isinstance(found, Choice)
    return found


@pytest.fixture
def stranger(tmp_path: Path) -> Candidate:
    """The demo target with another vocabulary."""
    folder = tmp_path / "stranger"
    shutil.copytree(DEMO / "target", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Candidate("stranger", inspect(folder))


def test_the_largest_model_is_chosen_with_a_draft_of_its_vocabulary() -> None:
    found = chosen((PARALLEL, DRAFT, MID, TARGET))
    assert found.settings == (
        *("model.target=target", "model.draft=draft"),
        *(f"model.context={CONTEXT}", "cluster.stages=1"),
    )
    assert found.reasons[0].startswith("Target target, the largest in the caches that fits: 13.0")
    assert "(float32)" in found.reasons[0]
    assert found.reasons[1].startswith("Draft draft, which has the target's vocabulary: ")


def test_weights_have_the_most_bits_that_fit() -> None:
    half = (*PAIR, "model.dtype=bfloat16")
    assert needed(*half) < needed(*PAIR)
    found = chosen((TARGET, DRAFT), needed(*half))
    assert (found.target, found.draft) == (TARGET, DRAFT)
    assert "model.dtype=bfloat16" in found.settings
    plain = chosen((TARGET, DRAFT), needed(*PAIR))
    assert "model.dtype=bfloat16" not in plain.settings


def test_smaller_model_is_chosen_where_the_larger_does_not_fit_in_any_format() -> None:
    smaller = [
        *(f"model.target={DEMO / 'mid'}", f"model.draft={DEMO / 'draft'}"),
        *("model.dtype=bfloat16", *PAIR[2:]),
    ]
    found = chosen((TARGET, MID, DRAFT), needed(*smaller), "model.draft=draft")
    assert (found.target, found.draft) == (MID, DRAFT)
    assert "target would not." in found.reasons[0]


def test_draft_tokens_come_from_the_text_where_no_draft_has_the_vocabulary(
    stranger: Candidate,
) -> None:
    found = chosen((stranger, DRAFT))
    assert (found.target, found.draft) == (stranger, None)
    assert "proposer=suffix" in found.settings
    assert "no other model in the caches has its vocabulary" in found.reasons[1]


def test_target_with_a_draft_is_preferred_to_one_that_is_less_than_twice_as_large(
    stranger: Candidate,
) -> None:
    found = chosen((stranger, MID, DRAFT))
    assert (found.target, found.draft) == (MID, DRAFT)
    assert "stranger fits too, but not with a draft." in found.reasons[0]


def test_stages_on_hosts_of_unequal_memory_get_the_layers_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(
        "hosts:\n- {name: a, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}\n"
        "- {name: b, address: 127.0.0.2, ssh: local, devices: [cpu]}\n"
    )
    layers = TARGET.info.num_layers
    split = f"cluster.split=[{layers - 2},2]"
    on_b = needed(f"cluster={file}", *PAIR[:3], split, a=free(PLENTY), b={"cpu": 0})
    settings = (f"cluster={file}", "model.dtype=float32")
    found = chosen((TARGET, DRAFT), 0, *settings, a=free(PLENTY), b=free(on_b + 2**16))
    assert split in found.settings
    assert found.settings[-2:] == settings


def test_given_settings_are_not_chosen_again() -> None:
    settings = ("model.target=mid", "model.quantization=int8", "model.context=64")
    found = chosen((TARGET, MID, DRAFT), PLENTY, *settings)
    assert found.target is MID
    assert "as given" in found.reasons[0]
    assert found.settings == (
        *("model.target=mid", "model.draft=draft", "cluster.stages=1"),
        *settings[1:],
    )
    plain = chosen((TARGET, MID, DRAFT), PLENTY, "proposer=suffix")
    assert (plain.target, plain.draft) == (TARGET, None)
    assert plain.settings.count("proposer=suffix") == 1


def test_where_nothing_fits_the_model_that_lacks_least_is_named() -> None:
    found = choose((TARGET, MID, DRAFT), 2**20)
    assert isinstance(found, Fit)
    assert found.deployment.target.path == DRAFT.info.path
    assert found.where == "cpu"


def test_parallel_drafts_are_no_targets() -> None:
    with pytest.raises(ConfigError, match="can be a target"):
        choose((PARALLEL,))


def test_machine_with_gpus_has_a_stage_on_each_but_that_of_the_draft_or_on_all() -> None:
    settings = given(())
    assert settings.layouts(DRAFT, 4) == [("cluster.stages=3",), ("cluster.stages=4",)]
    assert settings.layouts(None, 4) == [("cluster.stages=4",)]
    assert settings.layouts(DRAFT, 1) == settings.layouts(DRAFT, 0) == [("cluster.stages=1",)]
    assert given(("cluster.stages=2",)).layouts(DRAFT, 4) == [()]
