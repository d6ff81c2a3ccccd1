"""The dashboard shows a decorated copy, tells feasible from infeasible, and lets nobody change anything."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import sample_storage
import sample_study

from vopt.optimizer.dashboard import DashboardServer, serve, study_asked_for
from vopt.optimizer.dashboard_guard import local_host
from vopt.optimizer.dashboard_storage import (
    LEGACY_CONSTRAINTS,
    ServedStorage,
    at_the_worst,
    copy_storage,
    feasible,
    shown_attributes,
)
from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.importance import importance


@dataclass(frozen=True)
class Stored:
    made: StudyRecord
    path: Path
    url: str


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The sample study in SQLite, its infeasible trials told with the values that they showed."""
    root = tmp_path_factory.mktemp("dashboard")
    made = sample_study.on_disk(sample_study.study(), root / "data")
    return Stored(made, root / "studies.db", sample_storage.store(made, root / "studies.db", raw_values=True))


@pytest.fixture(scope="module")
def dashboard(stored: Stored) -> Iterator[DashboardServer]:
    server = DashboardServer(stored.url, lambda _: [stored.made], port=0, refresh_s=0.0, secrets=("No available memory",))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.close()
    thread.join(10)


def ask(
    server: DashboardServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(
        server.url + path.lstrip("/"), method=method, data=b"{}" if method not in ("GET", "HEAD") else None
    )
    if host is not None:
        request.add_unredirected_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def study_of(server: DashboardServer) -> dict[str, Any]:
    status, body, _ = ask(server, "/api/studies/1")
    assert status == 200
    read: dict[str, Any] = json.loads(body)
    return read


def test_optunas_own_storage_would_show_the_infeasible_trial_as_best(stored: Stored) -> None:
    """Why ``ServedStorage`` exists. If this fails, Optuna's storage has learned about constraints."""
    storage = optuna.storages.RDBStorage(stored.url)
    assert storage.get_best_trial(1).number == 4
    storage.remove_session()
    storage.engine.dispose()


def test_the_best_trial_is_the_best_feasible_one(dashboard: DashboardServer) -> None:
    study = study_of(dashboard)
    assert [trial["number"] for trial in study["best_trials"]] == [8]
    constraints = {trial["number"]: trial["constraints"] for trial in study["trials"]}
    assert max(constraints[4]) > 0
    assert max(constraints[3]) > 0
    assert max(constraints[8]) <= 0


def test_trials_and_study_carry_notes_figures_and_logs(dashboard: DashboardServer, stored: Stored) -> None:
    study = study_of(dashboard)
    assert "vllm serve" in study["note"]["body"]
    assert "Better than" in study["note"]["body"]
    by_number = {trial["number"]: trial for trial in study["trials"]}
    assert "Infeasible: Limit on success rate" in by_number[4]["note"]["body"]
    assert "51.6 %" in by_number[4]["note"]["body"]
    assert all(trial["note"]["body"] for trial in study["trials"])
    assert {figure["id"] for figure in study["plotly_graph_objects"]} >= {"vopt-00-history", "vopt-01-pareto"}
    assert [artifact["filename"] for artifact in by_number[3]["artifacts"]] == ["engine.log"]
    assert "soak-engine.log" in [artifact["filename"] for artifact in study["artifacts"]]


def test_the_dashboards_own_importance_chart_shows_what_show_and_report_show(
    dashboard: DashboardServer, stored: Stored
) -> None:
    """Optuna's analysis of a dozen starts credits what the best one or two have in common."""
    study_of(dashboard)
    status, body, _ = ask(dashboard, "/api/studies/1/param_importances")
    assert status == 200
    shown = json.loads(body)["param_importances"]
    assert [{row["name"]: row["importance"] for row in rows} for rows in shown] == [dict(importance(stored.made).shares)]


def test_a_log_can_be_read_without_its_secrets_and_by_no_other_site(dashboard: DashboardServer) -> None:
    study = study_of(dashboard)
    trial = next(trial for trial in study["trials"] if trial["number"] == 3)
    status, body, headers = ask(dashboard, f"/artifacts/1/{trial['trial_id']}/{trial['artifacts'][0]['artifact_id']}")
    assert status == 200
    assert b"Traceback" in body
    assert b"No available memory" not in body, "the known secret is taken out"
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_records_that_only_programs_read_are_not_shown(dashboard: DashboardServer) -> None:
    study = study_of(dashboard)
    shown = {attribute["key"] for row in (study, *study["trials"]) for attribute in row["user_attrs"]}
    assert not {"record", "setup", "recommendation"} & shown
    assert "label" in shown
    assert shown_attributes({"start:1": {}, "hf_token": "abcdefgh", "a": 1}) == {"hf_token": "[removed]", "a": 1}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/studies/1"),
        ("POST", "/api/studies/1/rename"),
        ("POST", "/api/studies"),
        ("PUT", "/api/studies/1/note"),
        ("POST", "/api/trials/1/tell"),
        ("POST", "/incompatible-rdb-schema"),
        ("DELETE", "/api/artifacts/1/1/x"),
    ],
)
def test_nothing_can_be_written(dashboard: DashboardServer, stored: Stored, method: str, path: str) -> None:
    before = hashlib.sha256(stored.path.read_bytes()).hexdigest()
    status, body, _ = ask(dashboard, path, method=method)
    assert status == 403
    assert b"cannot be changed" in body
    assert hashlib.sha256(stored.path.read_bytes()).hexdigest() == before
    assert len(study_of(dashboard)["trials"]) == 19


def test_another_name_for_this_machine_is_refused(dashboard: DashboardServer) -> None:
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.evil:80"):
        assert ask(dashboard, "/api/studies", host=host)[0] == 403
    assert ask(dashboard, "/api/studies", host="localhost:1234")[0] == 200
    assert local_host("[::1]:80")
    assert local_host("LOCALHOST")


def test_the_served_file_cannot_be_written_even_past_the_guard(stored: Stored, tmp_path: Path) -> None:
    copy_storage(stored.url, tmp_path / "copy.db")
    storage = ServedStorage(tmp_path / "copy.db")
    with pytest.raises(Exception, match="during the commit") as refused:
        storage.delete_study(1)
    assert "readonly" in str(refused.value.__cause__)
    storage.remove_session()
    storage.engine.dispose()


def test_an_infeasible_trial_does_not_stretch_a_plot_and_looks_best_nowhere() -> None:
    """The first trials of a study may be told 0 or the load's deadline before any is feasible."""
    space = {"x": optuna.distributions.IntDistribution(0, 9)}
    study = optuna.create_study(directions=["maximize", "minimize"])
    rows = [([0.0, 1800.0], 0.1), ([13_000.0, 4.3], -0.1), ([16_000.0, 2.7], -0.2), ([14_000.0, 2.0], 0.3)]
    for values, violation in rows:
        attributes = {LEGACY_CONSTRAINTS: [violation]}
        study.add_trial(optuna.trial.create_trial(values=values, params={"x": 1}, distributions=space, system_attrs=attributes))
    served = at_the_worst(study.get_trials(), study.directions)
    assert [trial.values for trial in served] == [[13_000.0, 4.3], [13_000.0, 4.3], [16_000.0, 2.7], [13_000.0, 4.3]]


def test_the_address_names_the_study_that_was_asked_for(tmp_path: Path) -> None:
    url = sample_storage.store(sample_study.running(), tmp_path / "studies.db")
    heard: list[str] = []

    class Enough(Exception):
        pass

    def ready(address: str) -> None:
        heard.append(address)
        raise Enough

    for typed in (None, "qwen3.5-35b-a3b-fp8-throughput-6", "qwen"):
        with pytest.raises(Enough):
            serve(url, typed, port=0, ready=ready)
    assert all(address.endswith("/dashboard/studies/1") for address in heard)
    with pytest.raises(UsageError, match="nosuch"):
        serve(url, "nosuch", port=0, ready=ready)


def test_a_running_search_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    made = sample_study.running()
    url = sample_storage.store(made, tmp_path / "studies.db")
    server = DashboardServer(url, lambda _: [made], port=0, refresh_s=0.0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert len(study_of(server)["trials"]) == 5
        writer = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 0.2}})
        for _ in range(3):
            study = optuna.load_study(study_name=made.name, storage=writer)
            study.tell(study.ask(), 1.0)
            study_of(server)
        assert len(study_of(server)["trials"]) == 8
        with sqlite3.connect(tmp_path / "studies.db") as lock:
            lock.execute("BEGIN EXCLUSIVE")
            assert len(study_of(server)["trials"]) == 8, "a locked source leaves the last copy in place"
            lock.rollback()
        lock.close()
        writer.remove_session()
        writer.engine.dispose()
    finally:
        server.close()
        thread.join(10)


def test_without_a_feasible_trial_there_is_no_best_one(tmp_path: Path) -> None:
    made = sample_study.nothing_feasible()
    url = sample_storage.store(made, tmp_path / "studies.db", raw_values=True)
    server = DashboardServer(url, lambda _: [made], port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert study_of(server)["best_trials"] == []
    finally:
        server.close()
        thread.join(10)


def test_storage_and_port_that_cannot_be_used_say_so(tmp_path: Path, dashboard: DashboardServer, stored: Stored) -> None:
    with pytest.raises(EnvironmentLacks, match="does not exist"):
        DashboardServer(f"sqlite:///{tmp_path / 'none.db'}", lambda _: [], port=0)
    with pytest.raises(EnvironmentLacks, match="no storage URL"):
        DashboardServer("nonsense", lambda _: [], port=0)
    (tmp_path / "text.db").write_text("no database " * 100)
    with pytest.raises(EnvironmentLacks, match="cannot be read"):
        DashboardServer(f"sqlite:///{tmp_path / 'text.db'}", lambda _: [], port=0)
    taken = int(dashboard.url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(EnvironmentLacks, match=f"port {taken}"):
        DashboardServer(stored.url, lambda _: [], port=taken)


def test_small_rules() -> None:
    assert study_asked_for("/api/studies/12/param_importances") == 12
    assert study_asked_for("/api/studies") is None
    assert study_asked_for("/dashboard/studies/1") is None
    assert feasible([])
    assert feasible([0.0, -1])
    assert not feasible([-1, 1e-9])
