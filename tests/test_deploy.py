"""The files of deploy/: they parse, and agree with the commands, options and metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from pichak_agent.metrics_text import metrics_text
from pichak_coordinator.cli import app
from pichak_coordinator.cluster import LEFT_OUT
from pichak_coordinator.fleet_metrics import exported_names, families
from pichak_coordinator.watch_view import WatchView

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FILES = sorted(p for p in DEPLOY.rglob("*") if p.is_file())
YAMLS = [p for p in FILES if p.suffix in (".yaml", ".yml")]
PAGE = ROOT / "docs" / "DEPLOY.md"
PROMETHEUS = DEPLOY / "prometheus"
TOKEN = {"name": "pichak-ray-token", "key": "auth_token"}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def test_there_is_something_to_test() -> None:
    folders = {p.relative_to(DEPLOY).parts[0] for p in FILES}
    assert {"docker", "kubernetes", "prometheus", "ray"} <= folders


@pytest.mark.parametrize("path", YAMLS, ids=named)
def test_yaml_parses_and_says_nothing_twice(path: Path) -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice: {keys}"
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor("tag:yaml.org,2002:map", mapping)
    assert list(yaml.load_all(path.read_text(encoding="utf-8"), Strict))


# -- commands -------------------------------------------------------------------------------------

#: What ends a command in a shell line, a comment or a sentence.
_END = re.compile(r"\s(?:#|\||&&|;|>|2>|-- |   )|[`'\n]|\\$")


def written(path: Path) -> Iterator[list[str]]:
    """Every ``pichak COMMAND …`` of a file, continued lines joined; of PowerShell what is quoted in
    backticks, as the rest is sentences."""
    text = path.read_text(encoding="utf-8")
    joined = re.sub(r"\{\{.*?\}\}", "X", re.sub(r"\\\n[#\s]*", " ", text))
    if path.suffix == ".ps1":
        joined = "\n".join(re.findall(r"`(pichak [^`]*)`", joined))
    groups = "|".join(sorted(app.list_commands(click.Context(app))))
    for found in re.finditer(rf"(?<![\w.-])pichak ((?:{groups})\b[^\n]*)", joined):
        words = shlex.split(_END.split(found.group(1))[0])
        yield [word for word in words if not re.fullmatch(r"\$\w+", word)]
    # Options that a service is given in its environment.
    for name, options in re.findall(r"^PICHAK_(AGENT|WATCH)_OPTIONS=(.*)$", text, re.M):
        command = ["agent", "run"] if name == "AGENT" else ["fleet", "watch"]
        yield [*command, *shlex.split(options)]


def listed(value: Any) -> Iterator[list[str]]:
    """Every ``[pichak, …]`` of a document."""
    if isinstance(value, dict):
        for item in value.values():
            yield from listed(item)
    elif isinstance(value, list):
        if value and value[0] == "pichak":
            yield [str(word) for word in value[1:]]
        for item in value:
            yield from listed(item)


def parsed(words: list[str]) -> click.Context:
    """As click parses it, its callbacks and the files that it names left aside."""
    command: click.Command = app
    context = click.Context(app, info_name="pichak")
    while isinstance(command, click.Group):
        name = words[0] if words else ""
        known = command.get_command(context, name)
        assert known is not None, f"{context.command_path} {name!r} does not exist"
        context = click.Context(known, info_name=name, parent=context)
        command, words = known, words[1:]
    given, rest, _ = command.make_parser(context).parse_args(args=list(words))
    assert not rest, f"{context.command_path}: {rest}"
    for option in command.params:
        value = given.get(option.name or "")
        if isinstance(option.type, (click.IntRange, click.Choice)):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, str):
                    option.type.convert(each, option, context)
    missing = [p.name for p in command.params if p.required and p.name not in given]
    # A command that stands alone is only named.
    assert not words or not missing, f"{context.command_path} without {missing}"
    return context


def commands() -> list[Any]:
    found = []
    for path in [*FILES, PAGE]:
        lines = list(written(path))
        if path in YAMLS:
            lines += [words for document in documents(path) for words in listed(document)]
        found += [pytest.param(words, id=f"{named(path)}: {' '.join(words)}") for words in lines]
    return found


@pytest.mark.parametrize("words", commands())
def test_every_command_line_is_one_that_click_takes(words: list[str]) -> None:
    if words[:2] == ["agent", "run"] and "--address" not in " ".join(words):
        words = [*words, "--address", "from:RAY_ADDRESS"]
    parsed(words)


def test_command_lines_are_found_where_they_stand() -> None:
    compose = {
        tuple(words) for path in (DEPLOY / "docker").glob("*.yaml")
        for document in documents(path) for words in listed(document)
    }  # fmt: skip
    assert any(words[:2] == ("agent", "run") for words in compose)
    watch = DEPLOY / "kubernetes" / "base" / "watch.yaml"
    (line,) = [
        words for words in written(watch) if words[:2] == ["fleet", "watch"] and len(words) > 2
    ]
    assert line[-4:] == ["--metrics-port", "9479", "--metrics-host", "0.0.0.0"]
    with pytest.raises(click.NoSuchOption):
        parsed(["fleet", "watch", "--metric-port", "9479"])
    with pytest.raises(AssertionError, match="does not exist"):
        parsed(["fleet", "observe"])


# -- metrics --------------------------------------------------------------------------------------


def agent_names() -> set[str]:
    """What an agent with a GPU and every reading would export."""
    from pichak_agent import metrics_text as module

    gpu = {"index": 0, "uuid": "GPU-0", "lost": "", "live": dict.fromkeys(module._GPU, 1.0)}
    state = {
        "latest": {"host": dict.fromkeys(module._HOST, 1.0)},
        "gpus": [gpu],
        "findings": [{"code": "c", "severity": "fail", "state": "confirmed", "subject": "s"}],
        "interval_seconds": 1.0,
        "readings": 1,
        "cpu_seconds": 1.0,
    }
    return set(re.findall(r"^(pichak_\w+)[{ ]", metrics_text(state), re.M))


def expressions() -> dict[str, list[str]]:
    rules = documents(PROMETHEUS / "pichak.rules.yml")[0]
    board = json.loads((PROMETHEUS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    tests = (PROMETHEUS / "pichak.rules.test.yml").read_text(encoding="utf-8")
    drawn = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    asked = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    return {
        "rules": [rule["expr"] for group in rules["groups"] for rule in group["rules"]],
        "dashboard": [*drawn, *asked],
        "tests of the rules": re.findall(r"series: '(.+?)'", tests),
    }


@pytest.mark.parametrize("where", ["rules", "dashboard", "tests of the rules"])
def test_expressions_use_metrics_that_exist(where: str) -> None:
    known = exported_names() | agent_names()
    some = expressions()[where]
    assert len(some) > 5
    for expression in some:
        bare = re.sub(r'"[^"]*"', '""', expression)
        names = set(re.findall(r"\bpichak_\w+", bare))
        assert names or bare.startswith("up{"), expression
        assert names <= known, f"{expression}: {sorted(names - known)}"


def test_labels_in_selectors_exist() -> None:
    labels = {family.name: set(family.labels) for family in families(WatchView(0.0, 0.0))}
    for some in expressions().values():
        for name, inside in re.findall(r"\b(pichak_\w+)\{([^}]*)\}", " ".join(some)):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)) - {"job", "instance"}
            known = labels.get(name.removesuffix("_total"))
            if known is not None:
                assert used <= known, f"{name}: {sorted(used - known)}"


def test_the_dashboard_places_its_panels_beside_each_other() -> None:
    board = json.loads((PROMETHEUS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "pichak.rules.yml"],
        ["test", "rules", "pichak.rules.test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_agrees(arguments: list[str]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- Ray ------------------------------------------------------------------------------------------


def ray_file(name: str) -> Path:
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / name


def test_the_launcher_file_fits_ray_s_own_schema() -> None:
    schema = json.loads(ray_file("autoscaler/ray-schema.json").read_text(encoding="utf-8"))
    (cluster,) = documents(DEPLOY / "ray" / "cluster.yaml")
    jsonschema.validate(cluster, schema)
    defaults = ray_file("autoscaler/local/defaults.yaml")
    assert set(documents(defaults)[0]) >= set(cluster) - {"provider"}
    assert cluster["provider"]["type"] == "local"


def ray_starts() -> Iterator[tuple[str, str]]:
    """(where, what follows ``ray start``) of every such line of the files."""
    for path in FILES:
        text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        text = re.sub(r"\$\([^)]*\)", "10.0.0.9", text)  # what the shell puts in
        for line in re.findall(r"\bray start (--[^\n;&|]*)", text):
            yield named(path), line
    for path in (DEPLOY / "docker").glob("*.yaml"):
        for service in documents(path)[0]["services"].values():
            if service.get("command", [])[:2] == ["ray", "start"]:
                yield named(path), shlex.join(service["command"][2:])


def test_every_ray_start_is_one_that_ray_takes() -> None:
    from ray.scripts.scripts import start

    lines = list(ray_starts())
    assert len(lines) >= 4
    for where, line in lines:
        context = start.make_context("start", shlex.split(line))
        assert context.params["head"] != bool(context.params["address"]), where
        # What is measured is memory and disk: Ray's own store stays small.
        assert context.params["object_store_memory"] == 100 * 1024 * 1024, where
        if context.params["head"]:
            assert context.params["include_dashboard"] is False, where


def test_the_token_is_on_and_never_written_down() -> None:
    (cluster,) = documents(DEPLOY / "ray" / "cluster.yaml")
    for kind in ("head", "worker"):
        (start,) = [c for c in cluster[f"{kind}_start_ray_commands"] if "ray start" in c]
        assert "RAY_AUTH_MODE=token" in start
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b[0-9a-f]{32,}\b", text), named(path)
        assert not re.search(r"RAY_AUTH_MODE[=:]\s*disabled|--insecure", text), named(path)
        assert not re.search(r"RAY_AUTH_TOKEN=\S", text), named(path)


# -- Docker ---------------------------------------------------------------------------------------


def test_the_compose_file_opens_no_port_and_keeps_its_token_in_a_secret() -> None:
    (compose,) = documents(DEPLOY / "docker" / "compose.yaml")
    assert compose["services"]["agent"]["deploy"]["replicas"] == 3
    for name, service in compose["services"].items():
        assert "ports" not in service, name
        assert "privileged" not in service, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["secrets"] == ["ray_token"], name
        assert service["shm_size"] == "256m", name
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
    assert set(compose["secrets"]) == {"ray_token"}


def test_the_image_runs_as_nobody_special_and_copies_what_exists() -> None:
    lines = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    plain = re.sub(r"\\\n\s*", " ", "\n".join(x for x in lines.splitlines() if x[:1] != "#"))
    steps = [line.split(None, 1) for line in plain.splitlines() if line.strip()]
    assert [rest for step, rest in steps if step == "USER"] == ["pichak"]
    assert any(step == "HEALTHCHECK" for step, _ in steps)
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for step, rest in steps:
        if step == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in allowed, f"{source} is kept out by .dockerignore"
    assert allowed[1] == "*"
    state = (ROOT / "coordinator/pichak_coordinator/cli/agent_status.py").read_text("utf-8")
    assert "print_json" in state  # the health check reads `"state": "joined"` of it


# -- Kubernetes -----------------------------------------------------------------------------------


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec in a document."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for item in value.values():
            yield from pods(item)
    elif isinstance(value, list):
        for item in value:
            yield from pods(item)


def resources() -> list[Any]:
    return [
        document
        for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
        if path.name != "kustomization.yaml"
        for document in documents(path)
    ]


def test_pods_are_unprivileged_and_take_the_token_from_the_secret() -> None:
    found = [(d["kind"], pod) for d in resources() for pod in pods(d)]
    assert [kind for kind, _ in found] == ["RayCluster", "RayCluster", "Deployment", "RayJob"]
    for kind, pod in found:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            env = {each["name"]: each for each in container["env"]}
            assert env["RAY_AUTH_MODE"]["value"] == "token"
            assert env["RAY_AUTH_TOKEN"]["valueFrom"] == {"secretKeyRef": TOKEN}
            mounts = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", [])}
            if kind != "RayJob":  # which only submits
                assert mounts["shm"] == "/dev/shm"
                volumes = {volume["name"]: volume for volume in pod["volumes"]}
                assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
                assert set(mounts) == set(volumes)


def test_the_cluster_neither_scales_nor_measures_its_head() -> None:
    (cluster,) = [d for d in resources() if d["kind"] == "RayCluster"]
    spec = cluster["spec"]
    assert spec["enableInTreeAutoscaling"] is False
    assert spec["authOptions"] == {"mode": "token", "secretName": TOKEN["name"]}
    assert spec["headGroupSpec"]["labels"] == dict([LEFT_OUT])
    for group in spec["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={spec['rayVersion']}" in constraints.splitlines()


def test_the_watch_is_alive_while_its_loop_turns() -> None:
    (watch,) = [d for d in resources() if d["kind"] == "Deployment"]
    (container,) = watch["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    for probe in ("livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert f"--metrics-port {port['containerPort']}" in container["args"][0]
    assert f"--labels={'='.join(LEFT_OUT)}" in container["args"][0]
    assert watch["spec"]["strategy"] == {"type": "Recreate"}
    claims = {d["metadata"]["name"] for d in resources() if d["kind"] == "PersistentVolumeClaim"}
    asked = {
        volume["persistentVolumeClaim"]["claimName"]
        for d in resources() for pod in pods(d) for volume in pod.get("volumes", [])
        if "persistentVolumeClaim" in volume
    }  # fmt: skip
    assert asked == claims


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "cpu", "profile"])
def test_kustomize_builds_it(folder: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert {d["metadata"]["namespace"] for d in made} == {"pichak-fleet"}
    images = {c["image"] for d in made for pod in pods(d) for c in pod["containers"]}
    assert len(images) == 1
    assert images.pop().startswith("registry.example.com/pichak-fleet:")
    assert ("nvidia.com/gpu" in done.stdout) is (folder == "base")
