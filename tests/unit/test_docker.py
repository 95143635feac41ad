"""The Dockerfile and compose.yaml, checked without Docker: by rules of hadolint and of our own."""

import re
from pathlib import Path
from typing import Any

import yaml

from pipespec.cli import serve
from pipespec.cli.main import _parser
from pipespec.config.compose import compose
from pipespec.console.arguments import overrides
from pipespec.server.options import ServerOptions
from tests.helpers.dockerfile import Dockerfile

ROOT = Path(__file__).parents[2]
DOCKERFILE = Dockerfile(ROOT / "Dockerfile")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
CUDA: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "docker" / "cuda.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# A tag with a whole version: `latest`, `3` and `3.11` change what they mean.
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z0-9.-]+)?")
# What a cluster may take to end once its server has.
ENDING_S = 30.0


def understood(words: list[str]) -> list[str]:
    """The settings of a `pipespec serve`, which the command line and Hydra accept."""
    arguments, rest = _parser(words).parse_known_args(words)
    assert arguments.command is serve.run
    settings = overrides(rest, arguments.known_options)
    compose([text for text in settings if "/models/" not in text])
    return settings


def test_base_images_are_pinned() -> None:
    names = {stage.name for stage in DOCKERFILE.stages}
    for device in ("cpu", "cuda"):
        for stage in DOCKERFILE.stages:
            base = stage.base.replace("${DEVICE}", device)
            assert base in names or PINNED.fullmatch(base), base


def test_container_does_not_run_as_root() -> None:
    names = [each.name for each in DOCKERFILE.final.instructions]
    (user,) = DOCKERFILE.final.of("USER")
    assert user.arguments == "pipespec"
    (made,) = (each for each in DOCKERFILE.final.of("RUN") if "useradd" in each.arguments)
    assert re.search(r"--uid [1-9]\d+ .* pipespec$", made.arguments)
    # Nothing that makes the image runs as this user, and nothing that runs is root.
    assert max(i for i, name in enumerate(names) if name == "RUN") < names.index("USER")
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_files_are_copied_by_name_and_exist() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in patterns, "everything else, such as .git, stays out of the build"
    admitted = {line[1:] for line in patterns if line.startswith("!")}
    copied: set[str] = set()
    for stage in DOCKERFILE.stages:
        assert not stage.of("ADD")
        for each in stage.of("COPY"):
            if each.arguments.startswith("--from="):
                source, path = each.arguments.removeprefix("--from=").split()[:2]
                assert source in {known.name for known in DOCKERFILE.stages}
                assert any(path in run.arguments for run in DOCKERFILE.stage(source).of("RUN"))
            else:
                copied |= set(each.arguments.split()[:-1])
    assert copied == admitted
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_command_and_health_check_fit_the_server() -> None:
    (entry,), (command,) = DOCKERFILE.final.of("ENTRYPOINT"), DOCKERFILE.final.of("CMD")
    assert entry.exec_form == ["pipespec"]
    assert command.exec_form is not None
    assert understood(command.exec_form) == []
    (exposed,) = DOCKERFILE.final.of("EXPOSE")
    arguments, _ = _parser(command.exec_form).parse_known_args(command.exec_form)
    assert exposed.arguments == str(arguments.port)
    (health,) = DOCKERFILE.final.of("HEALTHCHECK")
    assert re.search(r"--interval=\S+ --timeout=\S+ --start-period=\S+", health.arguments)
    assert f"http://127.0.0.1:{arguments.port}/health" in health.arguments


def test_volumes_and_mounted_files_exist() -> None:
    named: set[str] = set()
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source, target, *options = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert options == ["ro"], f"{source} is a file of the repository"
            else:
                named.add(source)
    assert named == set(COMPOSE["volumes"])
    (home,) = re.findall(r"--home-dir (\S+)", str(DOCKERFILE.final.of("RUN")))
    assert f"state:{home}" in SERVICES["pipespec"]["volumes"], "requests outlive the container"


def test_secrets_come_from_the_environment_and_are_used() -> None:
    assert all(set(secret) == {"environment"} for secret in COMPOSE["secrets"].values())
    text = (ROOT / "compose.yaml").read_text()
    prometheus = (ROOT / "launch" / "docker" / "prometheus.yml").read_text()
    for service in SERVICES.values():
        for name in service["secrets"]:
            assert name in COMPOSE["secrets"]
            assert f"/run/secrets/{name}" in text + prometheus
    for variable in (secret["environment"] for secret in COMPOSE["secrets"].values()):
        assert f"{variable}=" in text.partition("name:")[0], "the first lines say how to start"


def test_compose_starts_a_server_that_pipespec_understands() -> None:
    words = SERVICES["pipespec"]["command"]
    settings = understood(words)
    models = [text.partition("=")[2] for text in settings if text.startswith("model.")]
    for model in models:  # of the folder that is mounted by default
        assert (ROOT / "demo" / Path(model).name / "config.json").is_file()
    assert "--host=0.0.0.0" in words, "Prometheus asks from another container"
    assert any(word.startswith("--api-key=@") for word in words)


def test_server_has_time_to_end() -> None:
    seconds = float(SERVICES["pipespec"]["stop_grace_period"].removesuffix("s"))
    assert seconds >= ServerOptions(("a",)).shutdown_timeout + ENDING_S


def test_image_has_the_version_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert SERVICES["pipespec"]["image"] == f"pipespec:{version}"
    assert CUDA["services"]["pipespec"]["image"] == f"pipespec:{version}-cuda"
