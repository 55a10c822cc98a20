"""The files in deploy/ that users copy: they fit the schemas of the programs that read them, and agree with each other.
No image is built and no cluster is used. What a schema cannot say (selectors, mounts, ports) has tests of its own.
"""

from __future__ import annotations

import configparser
import copy
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from mod_export.cli import cli
from mod_export.cli.serve import serve

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""Kubernetes versions: the oldest that kubernetes.yaml says it needs, and the newest with a schema."""

TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
NUMBER, SWITCH = {"type": "integer", "minimum": 0}, {"type": "boolean"}


def strict(required: str = "", **properties: Any) -> dict[str, Any]:
    """JSON Schema of an object that has only these fields."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


# KServe's fields that our files may use, from `openapi_types` of its Python models (kserve 0.21). The package itself
# needs fifty others, and older versions of psutil and protobuf than ours. Fields that are not listed here belong to a
# Pod or a container, and are checked with the schemas of Kubernetes.
PREDICTOR = strict(
    minReplicas=NUMBER, maxReplicas=NUMBER, timeout=NUMBER, canaryTrafficPercent=NUMBER, containerConcurrency=NUMBER,
    model={"type": "object"},
)  # fmt: skip
MODEL = strict(
    "modelFormat",
    modelFormat=strict("name", name=TEXT, version=TEXT),
    protocolVersion={"enum": ["v1", "v2", "grpc-v2"]},
    runtime=TEXT,
    runtimeVersion=TEXT,
    storageUri={"type": "string", "pattern": "^(pvc|s3|gs|hf|https?)://."},
)
RUNTIME = strict(
    "supportedModelFormats",
    supportedModelFormats={
        "type": "array",
        "items": strict("name", name=TEXT, version=TEXT, autoSelect=SWITCH, priority={"type": "integer", "minimum": 1}),
    },
    protocolVersions=TEXTS,
    multiModel=SWITCH,
    disabled=SWITCH,
)
RUNTIME_POD = {"affinity", "containers", "imagePullSecrets", "nodeSelector", "schedulerName", "tolerations", "volumes"}
"""Pod fields that a ServingRuntime has; an InferenceService has all of them."""
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


# Readers of the files.


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def document(name: str, kind: str) -> dict[str, Any]:
    return next(candidate for candidate in documents(name) if candidate["kind"] == kind)


def stages() -> list[list[tuple[str, str]]]:
    """Instructions of the Dockerfile and their values, by stage."""
    parser = DockerfileParser(fileobj=io.BytesIO((DEPLOY / "Dockerfile").read_bytes()))
    found: list[list[tuple[str, str]]] = []
    for line in parser.structure:
        if line["instruction"] == "FROM":
            found.append([])
        if line["instruction"] != "COMMENT":
            found[-1].append((line["instruction"], line["value"]))
    return found


def unit() -> dict[str, list[str]]:
    """Section [Service] of the unit. A name may occur several times."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "mod-export.service").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for line in text.partition("[Service]")[2].partition("[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def pod(name: str) -> dict[str, Any]:
    """Pod specification of mod-export's own server."""
    if name == "kserve.yaml":
        return dict(documents(name)[0]["spec"]["predictor"])
    return dict(document(name, "Deployment")["spec"]["template"]["spec"])


def command_line(name: str) -> list[str]:
    """Arguments after `mod-export serve` in a file."""
    image = dict(stages()[-1])
    if name == "Dockerfile":
        words = json.loads(image["ENTRYPOINT"]) + json.loads(image["CMD"])
    elif name == "mod-export.service":
        (line,) = unit()["ExecStart"]
        words = shlex.split(line)
    else:
        words = json.loads(image["ENTRYPOINT"]) + pod(name)["containers"][0]["args"]
    assert Path(words[0]).name == "mod-export"
    assert words[1] == "serve"
    return list(words[2:])


def options(name: str) -> dict[str, Any]:
    """Values by option, parsed from the command line by the command itself; raises UsageError if it cannot."""
    # The command runs under its group, as for users: it keeps the names of its help option from its first context.
    group = cli.make_context("mod-export", ["serve"])
    context = serve.make_context("serve", command_line(name), parent=group)
    return {spelling: context.params[parameter.name or ""] for parameter in serve.params for spelling in parameter.opts}


# Checks with the schema or program that reads each file.


def check_kubernetes(one: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(one, version, strict=True)


def check_kserve(one: dict[str, Any]) -> None:
    groups = {"InferenceService": "serving.kserve.io/v1beta1", "ServingRuntime": "serving.kserve.io/v1alpha1"}
    assert one["apiVersion"] == groups[one["kind"]]
    if one["kind"] == "ServingRuntime":
        assert one["spec"].keys() <= RUNTIME["properties"].keys() | RUNTIME_POD
        _divided(one["spec"], RUNTIME, one["metadata"])
        return
    jsonschema.validate(one["spec"], strict("predictor", predictor={"type": "object"}))
    predictor = one["spec"]["predictor"]
    assert ("model" in predictor) != ("containers" in predictor)
    if "model" not in predictor:
        _divided(predictor, PREDICTOR, one["metadata"])
        return
    model = predictor["model"]
    container = {"name": "kserve-container", **{key: model[key] for key in model.keys() - MODEL["properties"].keys()}}
    jsonschema.validate({key: model[key] for key in model.keys() & MODEL["properties"].keys()}, MODEL)
    _divided({**predictor, "containers": [container]}, PREDICTOR, one["metadata"])


def _divided(spec: dict[str, Any], schema: dict[str, Any], metadata: dict[str, Any]) -> None:
    fields = spec.keys() & schema["properties"].keys()
    jsonschema.validate({key: spec[key] for key in fields}, schema)
    rest = {key: spec[key] for key in spec.keys() - fields}
    check_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": rest})


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {"kubernetes.yaml": check_kubernetes, "kserve.yaml": check_kserve}
PODS = list(CHECKS)
FILES = ["Dockerfile", "mod-export.service", *PODS]


@pytest.mark.parametrize("name", CHECKS)
def test_documents_are_as_their_schemas_say(name: str) -> None:
    for content in documents(name):
        CHECKS[name](content)


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _objects(below)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, field) for name in PODS for field in ("containerPort", "terminationGracePeriodSeconds", "httpGet")),
        *(("kserve.yaml", field) for field in ("minReplicas", "modelFormat", "storageUri", "supportedModelFormats")),
        *(("kubernetes.yaml", field) for field in ("maxUnavailable", "stabilizationWindowSeconds", "accessModes")),
    ],
)
def test_a_misspelt_field_is_refused(name: str, field: str) -> None:
    changed = copy.deepcopy(documents(name))
    for place in [part for content in changed for part in _objects(content) if field in part]:
        place[field + "s"] = place.pop(field)
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        list(map(CHECKS[name], changed))


def test_the_dockerfile_has_known_instructions_and_the_sources_of_the_wheel() -> None:
    install, image = stages()
    assert {instruction for instruction, _ in install + image} <= INSTRUCTIONS
    copied = [word for instruction, value in install if instruction == "COPY" for word in value.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["package-dir"].values()
    assert {*packages, "pyproject.toml", "constraints.txt", project["project"]["readme"]} <= set(copied)
    (extras,) = [value.removeprefix("EXTRAS=") for instruction, value in install if instruction == "ARG"]
    assert extras.split(",") == ["serve", "ort", "generate"]
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    words = dict(image)
    assert words["STOPSIGNAL"] == "SIGTERM"
    assert words["USER"] == "10001:10001"
    assert all(json.loads(words[name]) for name in ("ENTRYPOINT", "CMD"))  # They are lists, so no shell comes between.
    check = json.loads(words["HEALTHCHECK"].partition(" CMD ")[2])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "mod-export.service").read_text(encoding="utf-8")
    copied = tmp_path / "mod-export.service"
    # systemd checks that the program exists.
    copied.write_text(text.replace("ExecStart=/opt/mod-export/bin/mod-export", f"ExecStart={sys.executable}"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copied], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_unit_is_locked_down() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(DEPLOY / "mod-export.service", encoding="utf-8")
    assert parser.sections() == ["Unit", "Service", "Install"]
    service = unit()
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictNamespaces"):
        assert service[name] == ["yes"], name
    assert service["ProtectSystem"] == ["strict"]
    assert service["CapabilityBoundingSet"] == [""]
    assert service["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert (service["KillSignal"], service["Restart"]) == (["SIGTERM"], ["on-failure"])
    # OpenVINO cannot run with the first, and free memory cannot be read with the second.
    assert not {"MemoryDenyWriteExecute", "ProcSubset"} & service.keys()


# Agreement between the files.


@pytest.mark.parametrize("name", FILES)
def test_the_command_line_is_one_that_the_command_takes(name: str) -> None:
    read = options(name)
    assert read["--api-key-file"] is not None
    assert read["--host"] == ("127.0.0.1" if name == "mod-export.service" else "0.0.0.0")


def test_whoever_stops_the_server_waits_longer_than_it_drains() -> None:
    (timeout,) = unit()["TimeoutStopSec"]
    assert int(timeout) > options("mod-export.service")["--drain"]
    for name in PODS:
        first = pod(name)["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod(name)["terminationGracePeriodSeconds"] > first + options(name)["--drain"]
    (stop_timeout,) = re.findall(r"--stop-timeout (\d+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    assert int(stop_timeout) > options("Dockerfile")["--drain"]


@pytest.mark.parametrize("name", PODS)
def test_ports_and_probes_are_those_of_the_server(name: str) -> None:
    (container,) = pod(name)["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == options(name)["--port"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in paths.values()} <= {port["name"], port["containerPort"]}
    assert {kind: probe["path"].rpartition("/")[2] for kind, probe in paths.items()} == {
        "startup": "ready", "readiness": "ready", "liveness": "live",
    }  # fmt: skip
    assert {probe["path"].rpartition("/")[0] for probe in paths.values()} == {"/v2/health"}


def test_the_image_is_asked_at_the_port_that_it_serves() -> None:
    words = dict(stages()[-1])
    (address,) = re.findall(r"http://[^']+", words["HEALTHCHECK"])
    assert urlsplit(address).path == "/v2/health/ready"
    assert urlsplit(address).port == int(words["EXPOSE"]) == options("Dockerfile")["--port"]


@pytest.mark.parametrize("name", PODS)
def test_pods_have_what_the_command_line_names(name: str) -> None:
    spec = pod(name)
    (container,) = spec["containers"]
    volumes = {entry["name"]: entry for entry in spec["volumes"]}
    mounts = {entry["mountPath"]: entry for entry in container["volumeMounts"]}
    assert {entry["name"] for entry in mounts.values()} == volumes.keys()
    key = Path(options(name)["--api-key-file"])
    secret = volumes[mounts[str(key.parent)]["name"]]["secret"]
    assert secret["items"] == [{"key": "api-keys", "path": key.name}]
    assert secret["secretName"] == document("kubernetes.yaml", "Secret")["metadata"]["name"]
    assert key == Path(options("Dockerfile")["--api-key-file"])
    if name == "kserve.yaml":
        served = {entry["name"]: entry["value"] for entry in container["env"]}
        assert (served["PROTOCOL"], urlsplit(served["STORAGE_URI"]).scheme) == ("v2", "pvc")
        assert options(name)["folder"] == Path("/mnt/models")  # KServe mounts it there.
    else:
        assert mounts[str(options(name)["folder"])]["readOnly"]
        assert options(name)["folder"] == options("Dockerfile")["folder"]


@pytest.mark.parametrize("name", PODS)
def test_pods_are_locked_down_and_keep_their_cores(name: str) -> None:
    spec = pod(name)
    (container,) = spec["containers"]
    user = spec["securityContext"]
    assert f"{user['runAsUser']}:{user['runAsGroup']}" == dict(stages()[-1])["USER"]
    assert user["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"]["cpu"].isdecimal()


def test_the_unit_hands_over_the_key_file_that_the_command_reads() -> None:
    (credential,) = unit()["LoadCredential"]
    read = Path("${CREDENTIALS_DIRECTORY}") / credential.split(":")[0]
    assert options("mod-export.service")["--api-key-file"] == read


def test_kubernetes_documents_find_each_other() -> None:
    deployment = document("kubernetes.yaml", "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (port,) = document("kubernetes.yaml", "Service")["spec"]["ports"]
    assert port["targetPort"] == pod("kubernetes.yaml")["containers"][0]["ports"][0]["name"]
    assert document("kubernetes.yaml", "Service")["spec"]["selector"] == labels
    for content in (deployment, document("kubernetes.yaml", "PodDisruptionBudget")):
        assert content["spec"]["selector"]["matchLabels"] == labels
    scaled = document("kubernetes.yaml", "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", deployment["metadata"]["name"])
    claim = document("kubernetes.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    assert pod("kubernetes.yaml")["volumes"][0]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}


def test_prometheus_sends_a_key_that_the_server_knows() -> None:
    secret = document("kubernetes.yaml", "Secret")["stringData"]
    assert secret["metrics-key"] in secret["api-keys"].splitlines()
    assert all(line.startswith("REPLACE-THIS") for line in secret["api-keys"].splitlines())
    (scrape,) = yaml.safe_load(document("kubernetes.yaml", "ConfigMap")["data"]["mod-export.yaml"])["scrape_configs"]
    assert scrape["metrics_path"] == "/metrics"
    assert scrape["authorization"]["type"] == "Bearer"
    assert Path(scrape["authorization"]["credentials_file"]).name == "metrics-key"


def test_the_autoscaler_goes_by_a_metric_that_the_server_has() -> None:
    (metric,) = document("kubernetes.yaml", "HorizontalPodAutoscaler")["spec"]["metrics"]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "mod_export" / "serve").rglob("*.py")]
    assert any(metric["pods"]["metric"]["name"] in source for source in sources)


def test_triton_is_served_by_the_runtime_that_stands_beside_it() -> None:
    runtime, service = documents("kserve.yaml")[1:]
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"] == "kserve-tritonserver"
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert model["modelFormat"]["name"] in {form["name"] for form in runtime["spec"]["supportedModelFormats"]}
    assert "--model-store=/mnt/models" in runtime["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("name", ["Dockerfile", "mod-export.service"])
def test_onnx_runtime_is_told_to_report_nothing(name: str) -> None:
    words = dict(stages()[-1])["ENV"].split() if name == "Dockerfile" else " ".join(unit()["Environment"]).split()
    assert "ORT_DISABLE_TELEMETRY=1" in words


def test_the_image_for_gpus_copies_what_exists_and_calls_targets_of_make() -> None:
    parser = DockerfileParser(fileobj=io.BytesIO((DEPLOY / "gpu.Dockerfile").read_bytes()))
    lines = [(line["instruction"], line["value"]) for line in parser.structure if line["instruction"] != "COMMENT"]
    for instruction, value in lines:
        if instruction == "COPY":
            assert all((ROOT / name).exists() for name in value.split()[:-1]), value
    called = [value.split()[1] for instruction, value in lines if instruction == "RUN" and value.startswith("make ")]
    called.append(json.loads(dict(lines)["CMD"])[1])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert called == ["demo-install", "gpu"]
    assert all(f"\n{name}: " in makefile for name in called)
