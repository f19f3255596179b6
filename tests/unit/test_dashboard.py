"""The Grafana dashboard and the alerts ask for what there is: metrics, labels and their values, from vLLM's own registry."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "vllm-mc2.json"
ALERTS = ROOT / "examples" / "grafana" / "alerts.yml"
METRICS_DOC = ROOT / "docs" / "metrics.md"

EXPOSE = """
import sys
from prometheus_client import REGISTRY, generate_latest
from vllm.config import DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm_mc2 import plugin
plugin.register()
for policy in ("recompute", "fail"):
    transfer = KVTransferConfig(
        kv_connector="MC2Connector", kv_role="kv_both", kv_load_failure_policy=policy,
        kv_connector_extra_config={"socket_dir": sys.argv[2]},
    )
    config = VllmConfig(
        model_config=ModelConfig(model=sys.argv[1], dtype="float32"),
        device_config=DeviceConfig("cpu"), kv_transfer_config=transfer,
    )
    PrometheusStatLogger(config)
    sys.stdout.write("METRICS" + generate_latest(REGISTRY).decode())
"""
"""What a server that is just starting exposes; with either policy, since that decides which hand-offs there can be."""

FROM_PROMETHEUS = {"instance", "job"}
"""Labels that the server does not know of."""
FUNCTIONS = {"histogram_quantile", "sum", "max", "rate", "increase", "label_values"}
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')


class Exposed(NamedTuple):
    """Label values by name of sample and label."""

    labels: dict[str, dict[str, set[str]]]

    def check(self, query: str) -> list[str]:
        """What is wrong with a query; also which metrics it asks for."""
        problems: list[str] = []
        grouped = {label.strip() for group in GROUPING.findall(query) for label in group.split(",") if label.strip()}
        rest = GROUPING.sub(" ", query)
        for name, matchers in SELECTOR.findall(rest):
            problems += self._check_selector(name, matchers, grouped)
        rest = SELECTOR.sub(" ", rest)
        rest = re.sub(r"\[[^\]]*\]", " ", rest)
        for name, parenthesis in re.findall(r"([a-zA-Z_:][\w:]*)\s*(\(?)", rest):
            if parenthesis:
                problems += [] if name in FUNCTIONS else [f"no function {name}"]
            else:
                problems += self._check_selector(name, "", grouped)
        return problems

    def _check_selector(self, name: str, matchers: str, grouped: set[str]) -> list[str]:
        known = self.labels.get(name)
        if known is None:
            return [f"no metric {name}"]
        found = MATCHER.findall(matchers)
        if MATCHER.sub("", matchers).strip():
            return [f"cannot read {matchers}"]
        problems = [f"{name} has no label {label}" for label in grouped - known.keys() - FROM_PROMETHEUS]
        for label, operator, value in found:
            if label in FROM_PROMETHEUS:
                continue
            if label not in known:
                problems.append(f"{name} has no label {label}")
            elif not value.startswith("$"):
                wanted = value.split("|") if "~" in operator else [value]
                problems += [f"{name}: {label} is never {each}" for each in wanted if each not in known[label]]
        return problems


@pytest.fixture(scope="module")
def exposed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """In a process of its own: vLLM stays out of this one."""
    command = [sys.executable, "-c", EXPOSE, str(tiny_model), str(tmp_path_factory.mktemp("metrics") / "s")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert answer.returncode == 0, answer.stderr
    labels: dict[str, dict[str, set[str]]] = {}
    for line in answer.stdout.partition("METRICS")[2].splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", line.removeprefix("METRICS"))
        if match is not None:
            known = labels.setdefault(match[1], {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', match[2] or ""):
                known.setdefault(label, set()).add(value)
    assert len([name for name in labels if name.startswith("vllm:mc2_")]) > 20
    return Exposed(labels)


def queries() -> dict[str, str]:
    """Of panels, variables and alerts, by where they stand."""
    board = json.loads(DASHBOARD.read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = variable["query"]["query"].replace("label_values(", "max by (")
    for group in msgspec.yaml.decode(ALERTS.read_bytes())["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def as_query(expression: str) -> str:
    """Of a variable, whose label comes last: ``label_values(metric, label)``."""
    match = re.fullmatch(r"max by \((\S+), (\w+)\)", expression)
    return expression if match is None else f"max by ({match[2]}) ({match[1]})"


def test_every_query_asks_for_what_there_is(exposed: Exposed) -> None:
    assert len(queries()) > 35
    assert {name: problems for name, query in queries().items() if (problems := exposed.check(as_query(query)))} == {}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(vllm:mc2_handoff_total[5m])", "no metric vllm:mc2_handoff_total"),
        ("vllm:mc2_handoffs", "no metric vllm:mc2_handoffs"),
        ("vllm:mc2_handoff_seconds", "no metric vllm:mc2_handoff_seconds"),
        ('vllm:mc2_leases{way="attach"}', "vllm:mc2_leases has no label way"),
        ('vllm:mc2_leases{state=~"held|lost"}', "vllm:mc2_leases: state is never lost"),
        ("sum by (le, rank) (vllm:mc2_map_seconds_bucket)", "vllm:mc2_map_seconds_bucket has no label rank"),
        ("summ(vllm:mc2_loans)", "no function summ"),
        ("vllm:mc2_loans{state=held}", "cannot read state=held"),
    ],
)
def test_a_wrong_query_is_found(exposed: Exposed, query: str, problem: str) -> None:
    assert exposed.check(query) == [problem]


def test_every_metric_is_on_the_dashboard_and_in_the_docs(exposed: Exposed) -> None:
    """And nothing is in the docs that there is not."""
    asked = " ".join(queries().values())
    text = METRICS_DOC.read_text()
    ours = {
        re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed.labels if name.startswith("vllm:mc2_")
    }
    ours = {name for name in ours if f"{name}_total" not in ours}  # those of _created
    assert [name for name in sorted(ours) if f"`{name}`" not in text and f"`{name}{{" not in text] == []
    assert [name for name in sorted(ours) if name not in asked] == []
    documented = set(re.findall(r"`(vllm:\w+)", text))
    assert documented - ours - exposed.labels.keys() == set()


def test_panels_have_ids_and_places_of_their_own() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]


def test_every_alert_is_in_the_docs() -> None:
    names = {rule["alert"] for group in msgspec.yaml.decode(ALERTS.read_bytes())["groups"] for rule in group["rules"]}
    text = METRICS_DOC.read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
