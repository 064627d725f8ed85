"""The objects of the chart fit each other: selectors, ports, volumes, secrets, network policies, security contexts."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_chart import CASES, Object, containers, render, rendered, selects

each_case = pytest.mark.parametrize("name", CASES)


def value(name: str, section: str, key: str) -> Any:
    """A value that a case sets, or None."""
    return CASES[name].get(section, {}).get(key)


def pod_labels(spec: Object) -> dict[str, str]:
    labels: dict[str, str] = spec["template"]["metadata"]["labels"]
    return labels


def ports(spec: Object) -> dict[str, int]:
    """TCP ports of a pod by name."""
    return {
        each["name"]: each["containerPort"]
        for one in containers(spec["template"]["spec"])
        for each in one.get("ports", ())
    }


@each_case
def test_workloads_select_their_own_pods_only(name: str) -> None:
    workloads = rendered(name).workloads
    for owner, spec in workloads.items():
        selector = spec["selector"]["matchLabels"]
        assert [each for each, other in workloads.items() if selects(selector, pod_labels(other))] == [owner]


@each_case
def test_services_reach_one_workload_each_at_ports_that_it_has(name: str) -> None:
    case = rendered(name)
    services = case.named("Service")
    for service in services.values():
        (spec,) = [spec for spec in case.workloads.values() if selects(service["selector"], pod_labels(spec))]
        assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports(spec)
    assert {spec["serviceName"] for spec in case.named("StatefulSet").values()} <= services.keys()
    assert len(services) == len(case.workloads)


@each_case
def test_mounts_have_volumes_and_volumes_are_mounted(name: str) -> None:
    for spec in rendered(name).workloads.values():
        pod = spec["template"]["spec"]
        volumes = [volume["name"] for volume in pod["volumes"]]
        volumes += [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())]
        assert len(set(volumes)) == len(volumes)
        mounts = {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]}
        assert mounts == set(volumes)
        for one in containers(pod):
            paths = [mount["mountPath"] for mount in one["volumeMounts"]]
            assert len(set(paths)) == len(paths)


@each_case
def test_one_network_policy_selects_each_pod(name: str) -> None:
    case = rendered(name)
    policies = case.named("NetworkPolicy")
    if value(name, "networkPolicy", "enabled") is False:
        assert policies == {}
        return
    for owner, spec in case.workloads.items():
        selecting = [
            each for each, policy in policies.items() if selects(policy["podSelector"]["matchLabels"], pod_labels(spec))
        ]
        assert selecting == [owner]
    for owner, policy in policies.items():
        rules = policy["ingress"]
        open_ports = {port["port"] for rule in rules for port in rule["ports"] if "endPort" not in port}
        listening = ports(case.workloads[owner])
        closed = {listening["metrics"]} if value(name, "networkPolicy", "prometheus") == [] else set()
        assert open_ports == set(listening.values()) - closed
        assert all(rule["from"] for rule in rules), "a rule without peers permits everybody"


@each_case
def test_who_reaches_which_port(name: str) -> None:
    """Commands of a stage are for the coordinator only, and process groups for trainers and engines of the model."""
    case = rendered(name)
    for owner, policy in case.named("NetworkPolicy").items():
        if "rlctl/model" not in policy["podSelector"]["matchLabels"]:
            continue
        rules = {rule["ports"][0]["port"]: rule for rule in policy["ingress"]}
        commands = ports(case.workloads[owner])["commands"]
        (peer,) = rules[commands]["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "coordinator"
        (group,) = [rule for rule in policy["ingress"] if "endPort" in rule["ports"][0]]
        assert group["from"][0]["podSelector"]["matchLabels"] == policy["podSelector"]["matchLabels"]
        assert not group["ports"][0]["port"] <= commands <= group["ports"][0]["endPort"]


@each_case
def test_budgets_select_the_pods_of_each_model_and_gateway(name: str) -> None:
    case = rendered(name)
    budgets = case.named("PodDisruptionBudget")
    for owner, budget in budgets.items():
        assert selects(budget["selector"]["matchLabels"], pod_labels(case.workloads[owner]))
    coordinator = {each for each in case.workloads if each.endswith("-coordinator")}
    off = value(name, "podDisruptionBudget", "enabled") is False
    assert budgets.keys() == (set() if off else case.workloads.keys() - coordinator)


@each_case
def test_the_account_has_no_rights(name: str) -> None:
    case = rendered(name)
    assert case.of("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []
    accounts = {each["metadata"]["name"]: each for each in case.of("ServiceAccount")}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    expected = value(name, "serviceAccount", "name") or next(iter(accounts))
    for spec in case.workloads.values():
        pod = spec["template"]["spec"]
        assert pod["serviceAccountName"] == expected
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # its variables begin with RLCTL_, as those of rlctl's settings


@each_case
def test_containers_have_no_privileges(name: str) -> None:
    for spec in rendered(name).workloads.values():
        pod = spec["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers(pod):
            context = one["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is (one["name"] != "engine")
            assert "/tmp" in [mount["mountPath"] for mount in one["volumeMounts"]]


@each_case
def test_a_volume_shares_the_temporary_files_of_engine_and_stage_server(name: str) -> None:
    for spec in rendered(name).workloads.values():
        pod = spec["template"]["spec"]
        for engine in pod.get("initContainers", ()):
            assert engine["restartPolicy"] == "Always", "a sidecar container"
            shared, own = (
                {(mount["name"], mount["mountPath"]) for mount in one["volumeMounts"]}
                for one in (engine, *pod["containers"])
            )
            assert shared <= own
            assert {"/tmp", "/dev/shm"} < {path for _, path in shared}


def test_an_engine_gets_a_gpu_for_each_rank_unless_the_values_say_otherwise() -> None:
    models = {
        spec["template"]["metadata"]["labels"]["rlctl/model"]: spec["template"]["spec"]
        for spec in rendered("everything").named("StatefulSet").values()
        if "rlctl/model" in spec["template"]["metadata"]["labels"]
    }
    limits = {name: containers(pod)[0]["resources"].get("limits") for name, pod in models.items()}
    assert limits == {"actor": {"nvidia.com/gpu": 2, "rdma/ib": 1}, "reward": {"nvidia.com/gpu": 1}, "draft": None}
    stage_servers = [pod["containers"][0].get("resources", {}) for name, pod in models.items() if name != "draft"]
    assert not any("limits" in resources for resources in stage_servers)


@each_case
def test_probes_ask_ports_that_the_pod_has(name: str) -> None:
    for spec in rendered(name).workloads.values():
        listening = ports(spec)
        for one in containers(spec["template"]["spec"]):
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe: dict[str, Any] = one.get(kind, {})
                if "tcpSocket" in probe:
                    port = probe["tcpSocket"]["port"]
                    assert port in listening or port in listening.values()
                if "grpc" in probe:
                    assert not value(name, "tls", "enabled"), "the kubelet has no certificate"
                    assert probe["grpc"]["port"] in (listening.get("grpc"), listening.get("commands"))


@each_case
def test_prometheus_reads_every_process(name: str) -> None:
    case = rendered(name)
    for monitor in case.named("ServiceMonitor").values():
        (endpoint,) = monitor["endpoints"]
        (expression,) = monitor["selector"]["matchExpressions"]
        assert expression == {"key": monitor["jobLabel"], "operator": "Exists"}
        services = [
            each
            for each in case.of("Service")
            if selects(monitor["selector"]["matchLabels"], each["metadata"]["labels"])
        ]
        assert len(services) == len(case.workloads)
        for service in services:
            assert service["metadata"]["labels"][monitor["jobLabel"]].startswith("rlctl-")  # as in examples/monitoring
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert bool(case.of("ServiceMonitor")) is bool(value(name, "serviceMonitor", "enabled"))


def test_an_empty_list_of_peers_permits_nobody() -> None:
    nobody: dict[str, Any] = {"trainers": [], "clients": [], "prometheus": []}
    case = render({"nobody": {"networkPolicy": nobody, "metrics": {"enabled": True}}})["nobody"]
    assert case.invalid == []
    policies = case.named("NetworkPolicy")
    assert not policies["rlctl-gateway-sglang"]["ingress"]
    sources = [peer for policy in policies.values() for rule in policy["ingress"] or () for peer in rule["from"]]
    assert {peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for peer in sources} == {"rlctl"}
