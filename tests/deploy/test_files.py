"""Files to deploy joulery with: they parse, and do what their comments say."""

import configparser
import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import joulery
from joulery.adapters.clusters.kueue.rights import NEEDED
from joulery.config.parsing.reading import load as load_site
from joulery.gateway.exporter.families import EXPORT_METRICS
from joulery.gateway.metrics import METRICS
from joulery.ui.cli.verbs import VERBS

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXAMPLES = sorted((DEPLOY.parent / "examples/slurm").glob("*.service"))
KNOWN = {family.name for family in (*EXPORT_METRICS, *METRICS)}


def load(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def expressions():
    """Every PromQL expression of the dashboard and the rules."""
    dashboard = json.loads((DEPLOY / "grafana/joulery-node.json").read_text())
    rules = [rule for group in load("prometheus/alerts.yml")["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + [r["expr"] for r in rules]


def test_queries_and_rules_name_metrics_that_are_exported():
    named = {name for text in expressions() for name in re.findall(r"\bjoulery_\w+", text)}
    assert named and named <= KNOWN


def test_panels_do_not_overlap_and_have_units():
    panels = json.loads((DEPLOY / "grafana/joulery-node.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_every_alert_says_how_bad_and_what():
    for group in load("prometheus/alerts.yml")["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in ("info", "warning", "critical") and rule["annotations"]["summary"]


def test_prometheus_takes_configuration_and_rules():
    if shutil.which("promtool") is None:
        pytest.skip("Prometheus is not installed")
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=DEPLOY / "prometheus", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_publishes_on_loopback_alone_and_mounts_what_exists():
    services = load("compose.yaml")["services"]
    assert set(services) == {"joulery-export", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (DEPLOY / volume.partition(":")[0]).exists(), volume
    assert services["joulery-export"]["cap_drop"] == ["ALL"]
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load("grafana/provisioning/dashboards/joulery.yaml")["providers"]
    assert any(provider["options"]["path"] in volume for volume in services["grafana"]["volumes"])


def test_the_image_has_two_stages_a_user_of_its_own_and_a_health_check():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    after = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10107" in after and any(line.startswith("HEALTHCHECK") for line in after)
    for name in (word for line in lines if line.startswith("COPY pyproject") for word in line.split()[1:-1]):
        assert (DEPLOY.parent / name).exists(), name


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_a_unit_starts_a_verb_in_a_sandbox(file):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(file.read_text())
    service = unit["Service"]
    assert service["ExecStart"].split()[1] in VERBS
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    assert "CapabilityBoundingSet" in service


def test_a_schedulers_unit_releases_its_holds_and_leaves_its_watchdog_alive():
    """The watchdog is in the unit's control group; holds outlive both, if nothing releases them."""
    units = [file for file in (*UNITS, *EXAMPLES) if "schedule" in file.name]
    assert len(units) == 3
    for file in units:
        text = file.read_text()
        start, stop = (line.partition("=")[2] for line in text.splitlines() if line.startswith("Exec"))
        assert stop == f"{start} --release" and "\nKillMode=process\n" in text, file
    for file in (file for file in EXAMPLES if "@" in file.name):
        commands = [line for line in file.read_text().splitlines() if line.startswith("Exec")]
        assert all("--cluster %i" in line for line in commands), file


def test_an_agents_sandbox_lets_it_write_where_the_docs_say_and_limit_power():
    (text,) = (file.read_text() for file in UNITS if "agent" in file.name)
    page = (DEPLOY.parent / "docs/how-to/slurm.md").read_text()
    (folder,) = (line for line in text.splitlines() if line.startswith("ReadWritePaths"))
    writable = [path.removeprefix("-") for path in folder.partition("=")[2].split()]
    (meters,) = {line.split()[1] for line in page.splitlines() if line.strip().startswith("meters: /") and "#" in line}
    assert any(meters.startswith(f"{path}/") for path in writable), meters
    assert "CAP_SYS_ADMIN" in text


def test_systemd_takes_the_units():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    files = map(str, (*UNITS, *EXAMPLES))
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in said if ".service:" in line and "joulery" in line], done.stderr


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_the_scheduler_beside_kueue_has_the_rights_it_uses_and_no_others():
    names = load("kubernetes/kueue/kustomization.yaml")["resources"]
    objects = {one["kind"]: one for name in names for one in documents(f"kubernetes/kueue/{name}")}
    rules = objects["ClusterRole"]["rules"]
    granted = {(verb, kind) for rule in rules for verb in rule["verbs"] for kind in rule["resources"]}
    assert granted == {(verb, kind) for verb, kind, _ in NEEDED}
    assert all(rule["apiGroups"] == ["kueue.x-k8s.io"] for rule in rules)
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    account = objects["ServiceAccount"]["metadata"]["name"]
    spec = objects["Deployment"]["spec"]
    assert (subject["name"], spec["template"]["spec"]["serviceAccountName"]) == (account, account)
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate"), "two would hold each other's jobs"
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"][0] in VERBS and container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_site_of_the_scheduler_beside_kueue_is_read():
    site = load_site(DEPLOY / "kubernetes/kueue/site.yaml")
    assert site.jobs is not None and site.jobs.backend == "kueue" and str(site.mode) == "advise"


def test_the_daemon_set_is_complete_and_restricted():
    kinds = {name: load(f"kubernetes/{name}") for name in load("kubernetes/kustomization.yaml")["resources"]}
    (container,) = kinds["daemonset.yaml"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] in VERBS
    limits = container["securityContext"]
    assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"]
    assert limits["capabilities"]["drop"] == ["ALL"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = kinds["daemonset.yaml"]["spec"]["template"]["spec"]["volumes"]
    assert mounted == {volume["name"] for volume in volumes}
    assert all(mount["readOnly"] for mount in container["volumeMounts"])


def test_gateways_on_kubernetes_join_the_engine_server_beside_rays_head(tmp_path):
    """Names, ports, tokens and flags of the two manifests and of the site file agree."""
    token = tmp_path / "join"
    token.write_text("a long token")
    text = (DEPLOY / "kubernetes/serving/site.yaml").read_text()
    (tmp_path / "site.yaml").write_text(text.replace("/etc/joulery-tokens/join", str(token)))
    site = load_site(tmp_path / "site.yaml")
    cluster, engine = documents("kubernetes/serving/ray.yaml")
    gateways, _ = documents("kubernetes/serving/gateways.yaml")
    (gateway,) = gateways["spec"]["template"]["spec"]["containers"]
    verb, *flags = gateway["args"]
    options = {name for option in command_of(verb).params for name in option.opts}
    assert {flag.partition("=")[0] for flag in flags} <= options
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags if "=" in flag)
    (port,) = engine["spec"]["ports"]
    assert given["join"] == f"{engine['metadata']['name']}:{port['port']}"
    head, up = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert up["args"][0] in VERBS and up["ports"][0]["name"] == port["targetPort"]
    assert (
        site.serving.gateways is not None and site.serving.gateways.join == f"0.0.0.0:{up['ports'][0]['containerPort']}"
    )
    assert (
        engine["spec"]["selector"].items() <= cluster["spec"]["headGroupSpec"]["template"]["metadata"]["labels"].items()
    )
    shared = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert shared == {"/tmp/ray", "/dev/shm"} <= {mount["mountPath"] for mount in up["volumeMounts"]}
    workers = [group["template"]["spec"]["containers"][0] for group in cluster["spec"]["workerGroupSpecs"]]
    for container in (gateway, head, up, *workers):
        limits = container["securityContext"]
        assert limits["runAsNonRoot"] and not limits["allowPrivilegeEscalation"]
        assert limits["capabilities"]["drop"] == ["ALL"] and "memory" in container["resources"]["limits"]
    (mount,) = (one["mountPath"] for one in up["volumeMounts"] if one["name"] == "tokens")
    assert f"{mount}/join" in text and given["join-token-file"] == f"{mount}/join"


def command_of(verb):
    return importlib.import_module(f"joulery.ui.cli.{verb}").command


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("kubernetes", "DaemonSet"), ("kubernetes/kueue", "Deployment"), ("kubernetes/serving", "RayCluster")],
)
def test_kustomize_builds_the_manifests_in_their_namespace(folder, kind):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(DEPLOY / folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {item["kind"]: item for item in yaml.safe_load_all(done.stdout)}
    (name,) = {built["Namespace"]["metadata"]["name"], built[kind]["metadata"]["namespace"]}
    assert name == "joulery"
    assert not re.search(r"image: joulery(-ray)?$", done.stdout, re.MULTILINE), "every image comes from the registry"
    assert not re.search(r"name: joulery-site$", done.stdout, re.MULTILINE), "every reference follows the site's hash"


def test_each_job_of_ci_has_a_machine_of_its_own():
    text = (DEPLOY.parent / ".github/workflows/tests.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["test"]
    assert {"run": ".ci/run ${{ matrix.job }}"} in job["steps"]
    script = (DEPLOY.parent / ".ci/run").read_text()
    assert set(job["strategy"]["matrix"]["job"]) == set(re.findall(r"^if runs (\w+); then", script, re.MULTILINE))
    done = subprocess.run([DEPLOY.parent / ".ci/run", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_the_release_publishes_without_a_secret():
    text = (DEPLOY.parent / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text and "password" not in text
    assert jobs["build"]["permissions"] == {"contents": "read"} and "environment" not in jobs["build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
    assert {"run": "make dist"} in jobs["build"]["steps"]
    (check,) = (step["run"] for step in jobs["build"]["steps"] if "sed -n" in step.get("run", ""))
    env = {"PATH": os.environ["PATH"], "GITHUB_REF_NAME": f"v{joulery.__version__}"}
    for name, code in ((env["GITHUB_REF_NAME"], 0), ("v99.0.0", 1)):
        done = subprocess.run(["bash", "-euc", check], cwd=DEPLOY.parent, env={**env, "GITHUB_REF_NAME": name})
        assert done.returncode == code
