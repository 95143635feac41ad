"""Where `pipespec up` keeps requests when nobody has said it, and when that folder goes."""

from pathlib import Path

import pytest

from pipespec.cli.main import main
from pipespec.cli.up import storing_requests
from pipespec.cluster import redis_setup
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.controller.data_folder import write_model
from pipespec.errors import RankFailed
from pipespec.system.end_signals import Terminated


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "pipespec" / "lab.data"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ([], True),
        (["policy=level", "controller.port=7000"], True),
        (["controller.data=/elsewhere"], False),
        (["controller.data=null"], False),
        (["controller=embedded"], False),
        (["controller=url", "controller.url=redis://host"], False),
    ],
)
def test_it_is_beside_the_entry_unless_the_user_has_said_something(settings, kept, data):
    config = compose(settings)
    with storing_requests("lab", config, settings) as (found, _):
        assert found.controller.data == (str(data) if kept else config.controller.data)
        data.mkdir(parents=True)
    assert data.exists()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated(15), RankFailed("it failed")])
def test_an_orderly_end_removes_it_and_a_failure_what_was_not_there(error, ready, before, data):
    if before:
        data.mkdir(parents=True)

    def run() -> None:
        with storing_requests("lab", compose([]), []) as (_, on_ready):
            data.mkdir(parents=True, exist_ok=True)
            (data / "appendonly.aof").touch()
            if ready:
                on_ready()
            raise error

    with pytest.raises(type(error)):
        run()
    assert data.exists() == (isinstance(error, RankFailed) and (before or ready))


def test_an_end_before_there_was_any_is_an_end(data):
    with pytest.raises(Terminated), storing_requests("lab", compose([]), []):
        raise Terminated(15)
    assert not data.exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.dtype=bfloat16"], "bfloat16); run `pipespec down lab`, or choose another --name"),
        (
            ["model.context=64"],
            "a context of 2048 tokens, but model.context is 64; raise it, or run `pipespec down",
        ),
        (["model.quantization=int8"], "quantised to int8"),
    ],
)
def test_what_other_requests_were_asked_of_does_not_start(settings, said, data, capsys):
    data.mkdir(parents=True)
    write_model(data, redis_setup.kept_model(decide(compose(["model.dtype=float32"]))))
    before = sorted(data.iterdir())
    assert main(["up", "--name", "lab", "model.dtype=float32", *settings]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"pipespec: '{data}' keeps requests to ")
    assert said in err
    # A folder that the user has named is looked at in the same way, by every command.
    named = [f"controller.data={data}", "model.dtype=float32", *settings]
    assert main(["generate", "--prompt", "a", *named]) == 2
    assert "remove that folder, or name another controller.data." in capsys.readouterr().err
    assert sorted(data.iterdir()) == before
