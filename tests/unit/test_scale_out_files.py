"""deploy/: several gateways. Manifests fit together, the chart names what it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gateway.policy.check import load_without_secrets
from gateway.policy.compile import compile as compiled

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/tidegate"
MANIFESTS = sorted((DEPLOY / "k8s").rglob("*.yaml"))
TEMPLATES = sorted((CHART / "templates").iterdir())


def resources() -> dict[tuple[str, str], dict]:
    found = {}
    for path in MANIFESTS:
        for resource in yaml.safe_load_all(path.read_text()):
            found[resource["kind"], resource["metadata"]["name"]] = resource
    return found


def pod() -> dict:
    return resources()["Deployment", "tidegate"]["spec"]["template"]


def test_every_selector_finds_its_pods():
    found = resources()
    labels = pod()["metadata"]["labels"]
    wanted = {"app.kubernetes.io/name": "tidegate"}
    assert wanted.items() <= labels.items()
    assert found["Deployment", "tidegate"]["spec"]["selector"]["matchLabels"] == wanted
    assert found["Service", "tidegate"]["spec"]["selector"] == wanted
    assert found["PodDisruptionBudget", "tidegate"]["spec"]["selector"]["matchLabels"] == wanted
    target = found["HorizontalPodAutoscaler", "tidegate"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "tidegate")
    store = found["StatefulSet", "tidegate-valkey"]["spec"]
    assert store["selector"]["matchLabels"] == store["template"]["metadata"]["labels"]
    assert (
        found["Service", "tidegate-valkey"]["spec"]["selector"] == store["selector"]["matchLabels"]
    )


def test_ports_mounts_and_variables_are_there():
    spec = pod()["spec"]
    (gateway,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    assert ports == {"data": 8484, "admin": 8485}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert gateway[probe]["httpGet"]["port"] in ports
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {m["name"] for m in gateway["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    settings = (ROOT / "gateway/settings.py").read_text()
    for entry in gateway["env"]:
        if entry["name"].startswith("TIDEGATE_"):
            assert f'"{entry["name"]}"' in settings, entry["name"]
    keys = next(v["secret"] for v in spec["volumes"] if v["name"] == "keys")
    mounted = {item["path"] for item in keys["items"]}
    variables = {entry["name"]: entry.get("value") for entry in gateway["env"]}
    assert Path(variables["TIDEGATE_SECRET_FILE"]).name in mounted
    assert variables["TIDEGATE_REDIS_URL"] == "redis://tidegate-valkey:6379/0"


def test_pods_run_without_rights_and_drain_before_they_are_killed():
    for name in (("Deployment", "tidegate"), ("StatefulSet", "tidegate-valkey")):
        spec = resources()[name]["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "cpu" not in container["resources"]["limits"]
    assert pod()["spec"]["terminationGracePeriodSeconds"] >= 60
    rolling = resources()["Deployment", "tidegate"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] == 0


def test_agents_reach_names_and_the_gateway_and_no_provider():
    policy = resources()["NetworkPolicy", "agents-egress"]["spec"]
    assert policy["podSelector"] == {}
    assert policy["policyTypes"] == ["Egress"]
    reached = {
        (port["protocol"], port["port"]) for rule in policy["egress"] for port in rule["ports"]
    }
    assert reached == {("UDP", 53), ("TCP", 53), ("TCP", 8484)}
    assert all("ipBlock" not in to for rule in policy["egress"] for to in rule["to"])


def test_the_gateway_is_reached_by_agents_and_its_admin_listener_by_monitoring_alone():
    policy = resources()["NetworkPolicy", "tidegate"]["spec"]
    by_port = {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]}
    assert set(by_port) == {8484, 8485}
    (monitoring,) = by_port[8485]
    assert monitoring["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    blocks = [to["ipBlock"] for rule in policy["egress"] for to in rule["to"] if "ipBlock" in to]
    assert "169.254.0.0/16" in blocks[0]["except"]
    assert resources()["NetworkPolicy", "tidegate-valkey"]["spec"]["egress"] == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["manifest", "chart"])
def test_the_policy_that_ships_with_them_holds(where, tmp_path):
    if where == "manifest":
        text = resources()["ConfigMap", "tidegate-policy"]["data"]["policy.yaml"]
    else:
        text = yaml.safe_load((CHART / "values.yaml").read_text())["policy"]
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    snapshot = compiled(load_without_secrets(path, {}), revision=1)
    assert snapshot.model("gpt-4o") is not None
    assert "tidegate.tidegate" in snapshot.edge.allowed_hosts


def test_every_value_of_the_chart_is_there_and_every_block_is_closed():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "tidegate")
    used = set()
    for template in TEMPLATES:
        text = template.read_text()
        assert text.count("{{") == text.count("}}"), template.name
        opened = re.findall(r"\{\{-?\s*(?:if|range|with|define)\b", text)
        closed = re.findall(r"\{\{-?\s*end\b", text)
        assert len(opened) == len(closed), template.name
        for path in re.findall(r"\.Values\.([A-Za-z.]+)", text):
            used.add(path.split(".")[0])
            node = values
            for step in path.split("."):
                assert step in node, f"{template.name}: .Values.{path}"
                node = node[step]
        defined = re.findall(r'include "([a-z.]+)"', text)
        names = (CHART / "templates/_names.tpl").read_text()
        assert all(f'define "{name}"' in names for name in defined)
    assert used == set(values)


def test_compose_has_two_gateways_that_share_a_store_and_a_secret():
    compose = yaml.safe_load((DEPLOY / "compose.fleet.yaml").read_text())
    services = compose["services"]
    gateways = [services[name] for name in ("gateway-a", "gateway-b")]
    for gateway in gateways:
        assert gateway["environment"]["TIDEGATE_REDIS_URL"] == "redis://valkey:6379/0"
        assert gateway["secrets"] == ["tidegate"]
        assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    assert {port for gateway in gateways for port in gateway["ports"]} == {
        "127.0.0.1:8485:8485", "127.0.0.1:8495:8485",
    }  # fmt: skip
    command = services["valkey"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    balancer = (DEPLOY / "haproxy.cfg").read_text()
    assert "server a gateway-a:8484" in balancer
    assert "server b gateway-b:8484" in balancer
    assert "retries 0" in balancer
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source


def test_the_secret_of_compose_is_never_committed():
    assert "deploy/secret" in (ROOT / ".gitignore").read_text().splitlines()
