"""What `pipespec bench --policies` refuses before anything starts, and how it ends."""

import json

import pytest

import pipespec.cluster.session
import pipespec.extras.bench.comparison
from pipespec.cli.main import main
from pipespec.extras.bench.comparison import Comparison
from pipespec.extras.commands import bench
from tests.helpers.figures import LABELS, result

POLICIES = ("--policies", "root,level")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt-tokens", "0"], "prompt_tokens is 0"),
        (["--profile", "p.json"], "--policies and --profile cannot be combined"),
        (["cluster.stages=17"], "only 16 layers"),
        (["--policies", "root,level policy.width=-1"], "policy.width is -1"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused_at_once(arguments, part, monkeypatch, capsys):
    def none(*_: object, **__: object) -> None:
        raise AssertionError("an agent was started")

    monkeypatch.setattr(pipespec.cluster.session, "WorkerGroup", none)
    assert main(["bench", *POLICIES, *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("labels", "other", "code", "told"),
    [
        ({}, [1, 2, 3], 0, "equal, token for token"),
        ({}, [1, 2, 4], 1, "Texts differ from those of policy=root: 1 with policy=level."),
        ({"lossy": True}, [1, 2, 4], 0, "as the verifier is LOSSY: 1 with policy=level."),
        ({"emulated": True}, [1, 2, 3], 0, "equal, token for token"),
    ],
)
def test_texts_that_differ_are_an_error_unless_the_verifier_is_lossy(
    as_json, labels, other, code, told, monkeypatch, capsys
):
    done = Comparison({"policy=root": result([1, 2, 3]), "policy=level": result(other)})
    monkeypatch.setattr(Comparison, "labels", LABELS | labels)
    monkeypatch.setattr(bench, "compare", lambda *_, **__: done)
    assert main(["bench", *POLICIES, "--num-prompts", "1", *["--json"] * as_json]) == code
    out, err = capsys.readouterr()
    if as_json:
        found = json.loads(out)
        assert found["equal"] is (other == [1, 2, 3])
        assert [each["policy"] for each in found["policies"]] == ["policy=root", "policy=level"]
    else:
        assert "policy=level" in out
        assert told in (err if code else out)
        emulated = "emulated" in labels
        assert ("times EMULATED" in out, "overruns" in out) == (emulated, emulated)
    assert err == (f"pipespec: {told}\n" if code else "")
