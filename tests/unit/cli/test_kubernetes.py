"""The manifests of Kubernetes: they must say what Kubernetes requires, and fit one another."""

import re
from typing import Any

import yaml

from pipespec.config.hosts import load_hosts
from pipespec.server.options import ServerOptions
from pipespec.system.folders import resource_dir
from tests.unit.cli.test_service import ENDING_S
from tests.unit.test_docker import SERVICES

FOLDER = resource_dir("launch") / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
API = {"StatefulSet": "apps/v1", "Service": "v1", "PersistentVolumeClaim": "v1"}
A_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1123, for labels of DNS


def objects() -> dict[str, dict[str, dict[str, Any]]]:
    """The specifications by kind and name."""
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in API}
    for file in KUSTOMIZATION["resources"]:
        for each in yaml.safe_load_all((FOLDER / file).read_text()):
            assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
            assert each["apiVersion"] == API[each["kind"]]
            assert A_NAME.fullmatch(name := each["metadata"]["name"])
            assert found[each["kind"]].setdefault(name, each["spec"]) is each["spec"]
    return found


OBJECTS = objects()
SETS = OBJECTS["StatefulSet"]


def test_names_that_manifests_refer_to_exist() -> None:
    (maps,) = KUSTOMIZATION["configMapGenerator"]
    claims, services = OBJECTS["PersistentVolumeClaim"], OBJECTS["Service"]
    for each in SETS.values():
        template, pod = each["template"], each["template"]["spec"]
        labels = template["metadata"]["labels"]
        assert each["selector"]["matchLabels"].items() <= labels.items()
        assert services[each["serviceName"]]["clusterIP"] == "None", "pods get names by it"
        assert services[each["serviceName"]]["selector"].items() <= labels.items()
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] in claims
        assert volumes["hosts"]["configMap"]["name"] == maps["name"]
        for made in (container, *pod.get("initContainers", ())):
            assert A_NAME.fullmatch(made["name"])
            assert made["image"] == SERVICES["pipespec"]["image"]
            assert made["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
    (port,) = services["pipespec"]["ports"]
    head = SETS["pipespec-head"]["template"]
    (container,) = head["spec"]["containers"]
    (named,) = container["ports"]
    assert services["pipespec"]["selector"].items() <= head["metadata"]["labels"].items()
    assert port["targetPort"] == container["readinessProbe"]["httpGet"]["port"] == named["name"]
    assert f"--port={named['containerPort']}" in container["command"]
    assert "api-key" in {volume["name"] for volume in head["spec"]["volumes"]}
    grace = head["spec"]["terminationGracePeriodSeconds"]
    assert grace >= ServerOptions(("a",)).shutdown_timeout + ENDING_S


def test_hosts_are_the_pods() -> None:
    assert {host.name: host.address for host in load_hosts(FOLDER / "hosts.yaml").hosts} == {
        (pod := f"{name}-{number}"): f"{pod}.{each['serviceName']}"
        for name, each in SETS.items()
        for number in range(each["replicas"])
    }
