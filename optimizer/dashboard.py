"""optuna-dashboard on a read-only copy of the studies: it can neither disturb a search nor be used to change a study.

Version 0.21.0 of optuna-dashboard reads constraints under a key that Optuna 5 no longer writes, takes the best trial without
looking at constraints, has no authentication, and offers to delete studies. So it gets a storage that answers as it expects,
opened read-only, behind a guard that lets nothing but reading through.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, BinaryIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.storages import RDBStorage
from optuna.trial import Trial
from optuna_dashboard import save_note, save_plotly_graph_object, wsgi
from sqlalchemy import event

from vopt.optimizer.dashboard_guard import Guard, Start, WsgiApp, answer_json
from vopt.optimizer.dashboard_storage import ServedStorage, copy_storage, source_path, stamp
from vopt.optimizer.errors import EnvironmentLacks
from vopt.optimizer.history import StudyRecord
from vopt.optimizer.importance import importance
from vopt.optimizer.report.figures import search_figures
from vopt.optimizer.report.load_figures import record_figures, wanted_records
from vopt.optimizer.report.notes import study_note, trial_note
from vopt.optimizer.report.page import plotly_figure
from vopt.optimizer.report.raw import records_of
from vopt.optimizer.report.redaction import clean_text
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.storage import readable, storage_for

LOOPBACK = "127.0.0.1"
REFRESH_S = 5.0
"""A copy is at least this old before a newer one is made."""
_LOGS = ("engine.log", "server.log", "result.json")

ReadStudies = Callable[[str], Iterable[StudyRecord]]
"""Studies of a storage URL as values."""


class EvidenceStore:
    """An artifact store of files that stay where they are: only those that were offered can be read, and none written."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._paths: dict[str, Path] = {}
        self._secrets = secrets

    def offer(self, path: Path) -> str:
        """The artifact id under which a file can be read from now on."""
        name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
        self._paths[name] = path
        return name

    def open_reader(self, artifact_id: str) -> BinaryIO:
        try:
            text = self._paths[artifact_id].read_text(encoding="utf-8", errors="replace")
        except (KeyError, OSError) as error:
            raise ArtifactNotFound(artifact_id) from error
        return io.BytesIO(clean_text(text, self._secrets).encode())

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        raise PermissionError("this dashboard only shows")

    def remove(self, artifact_id: str) -> None:
        raise PermissionError("this dashboard only shows")


def decorate(study: optuna.Study, record: StudyRecord, store: EvidenceStore, secrets: Sequence[str] = ()) -> None:
    """Write notes, figures and the names of logs into a study. Call it on a copy: the user's own study stays as it is."""
    view = StudyView.of(record, secrets)
    names = [str(one["metric"]) for one in view.goal.get("objectives", ())] or [view.metric]
    if len(study.directions) == len(names):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental; without it the axis says "Objective 0"
            study.set_metric_names(names)
    save_note(study, study_note(view))
    starts = {trial.label: trial for trial in view.trials}
    for frozen in study.get_trials(deepcopy=False):
        start = starts.pop(str(frozen.user_attrs.get("label", frozen.number)), None)
        if start is not None:
            save_note(Trial(study, frozen._trial_id), trial_note(view, start))
            _attach(study, frozen._trial_id, Path(start.directory), store)
    for start in starts.values():  # confirmation and soak are no Optuna trials
        _attach(study, None, Path(start.directory), store, prefix=f"{start.label}-")
    figures = [*search_figures(view, importance(record).shares), *record_figures(view, records_of(wanted_records(view)))]
    for number, figure in enumerate(figures):
        drawn = plotly_figure(figure)
        drawn.update_layout(title={"text": figure.title}, margin={"t": 90}, paper_bgcolor="white", plot_bgcolor="white")
        save_plotly_graph_object(study, drawn, graph_object_id=f"vopt-{number:02d}-{figure.name}")


def _attach(study: optuna.Study, trial_id: int | None, directory: Path, store: EvidenceStore, *, prefix: str = "") -> None:
    """Name a start's logs as artifacts, in the form of ``optuna.artifacts.upload_artifact``."""
    for path in (directory / name for name in _LOGS):
        if directory.name and path.is_file():
            identity = store.offer(path)
            kind = "application/json" if path.suffix == ".json" else "text/plain"
            meta = {"artifact_id": identity, "filename": f"{prefix}{path.name}", "mimetype": kind, "encoding": "utf-8"}
            owner = "artifacts:" if trial_id is None else f"dashboard:artifacts:{trial_id}:"
            study._storage.set_study_system_attr(study._study_id, f"{owner}{identity}", json.dumps(meta))


class Copies:
    """A WSGI application on the newest copy of a storage. Studies are decorated when they are first asked for."""

    def __init__(self, url: str, folder: Path, read: ReadStudies, secrets: Sequence[str], refresh_s: float) -> None:
        self._url, self._folder, self._read, self._secrets, self._refresh_s = url, folder, read, secrets, refresh_s
        self._lock = threading.RLock()
        self._number, self._stamp, self._made_at = 0, (), float("-inf")
        self._served: list[ServedStorage] = []
        self._decorated: dict[int, list[list[dict[str, Any]]] | None] = {}
        self._refresh()

    _app: WsgiApp
    _stamp: tuple[Any, ...]
    _path: Path
    _store: EvidenceStore

    def __call__(self, environ: dict[str, Any], start_response: Start) -> Iterable[bytes]:
        with self._lock:
            if time.monotonic() - self._made_at >= self._refresh_s and stamp(self._url) != self._stamp:
                self._refresh()
            number = study_asked_for(str(environ.get("PATH_INFO", "")))
            if number is not None and number not in self._decorated:
                self._decorate(number)
            app, shares = self._app, self._decorated.get(number or 0)
        if shares is not None and str(environ.get("PATH_INFO", "")).rstrip("/").endswith("/param_importances"):
            return answer_json(start_response, {"param_importances": shares})
        return app(environ, start_response)

    def number_of(self, study_name: str) -> int:
        """A study's number in the copy, which need not be the one that it has in the source."""
        with self._lock:
            return int(self._served[0].get_study_id_from_name(study_name))

    def close(self) -> None:
        with self._lock:
            for storage in self._served:
                storage.engine.dispose()
            self._served = []

    def _refresh(self) -> None:
        """A new copy. A source that cannot be read just now (a writer holds it) leaves the old copy in place."""
        seen = stamp(self._url)
        path = self._folder / f"copy-{self._number + 1}.db"
        try:
            copy_storage(self._url, path)
        except EnvironmentLacks:
            path.unlink(missing_ok=True)
            if not self._number:
                raise
            self._made_at = time.monotonic()
            return
        self._number += 1
        self.close()
        (self._folder / f"copy-{self._number - 1}.db").unlink(missing_ok=True)
        self._path, self._store, self._decorated = path, EvidenceStore(self._secrets), {}
        storage = ServedStorage(path, self._secrets)
        self._served = [storage]
        self._app = wsgi(storage, artifact_store=self._store)
        self._stamp, self._made_at = seen, time.monotonic()

    def _decorate(self, number: int) -> None:
        self._decorated[number] = None
        url = f"sqlite:///{self._path}"
        # A copy can be made again at any time: it need not survive a power cut.
        writable = RDBStorage(url, skip_compatibility_check=True, skip_table_creation=True)
        event.listen(writable.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        writable.engine.dispose()  # connections made before the listener
        try:
            try:
                name = writable.get_study_name_from_id(number)
            except KeyError:
                return
            record = next((record for record in self._read(url) if record.name == name), None)
            if record is not None:
                decorate(optuna.load_study(study_name=name, storage=writable), record, self._store, self._secrets)
                self._decorated[number] = own_importances(record)
        finally:
            writable.remove_session()
            writable.engine.dispose()


def own_importances(record: StudyRecord) -> list[list[dict[str, Any]]]:
    """What optuna-dashboard's importance chart is given, by objective. Its own analysis compares the best tenth of the starts,
    one or two of a search, with all others: beside ours the page would contradict itself."""
    view = StudyView(record)
    metrics = [str(one["metric"]) for one in view.goal.get("objectives", ())] or [view.metric]
    return [
        [
            {"name": name, "importance": share, "distribution": "CategoricalDistribution"}
            for name, share in importance(record, metric).shares.items()
        ]
        for metric in metrics
    ]


def study_asked_for(path: str) -> int | None:
    """The study number in a path of optuna-dashboard's API."""
    parts = path.strip("/").split("/")
    return int(parts[2]) if len(parts) >= 3 and parts[:2] == ["api", "studies"] and parts[2].isdigit() else None


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Requests are nobody's business."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class DashboardServer:
    """The dashboard on a port of 127.0.0.1. ``serve_forever`` blocks; ``close`` ends it from another thread."""

    def __init__(
        self,
        url: str,
        read: ReadStudies,
        *,
        port: int = 8080,
        secrets: Sequence[str] = (),
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._serving = False
        self._folder = tempfile.TemporaryDirectory(prefix="vopt-dashboard-")
        try:
            self._copies = Copies(url, Path(self._folder.name), read, secrets, refresh_s)
            self._server = make_server(LOOPBACK, port, Guard(self._copies), server_class=_Server, handler_class=_Handler)
        except OSError as error:
            self._folder.cleanup()
            raise EnvironmentLacks(f"port {port} cannot be used: {error}", hint="--port 0 takes a free one") from error
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}/"

    def page_of(self, study_name: str) -> str:
        """The address of one study's page."""
        return f"{self.url}dashboard/studies/{self._copies.number_of(study_name)}"

    def serve_forever(self) -> None:
        self._serving = True
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        if self._serving:  # else there is no loop that could answer
            self._server.shutdown()
        self._server.server_close()
        self._copies.close()
        self._folder.cleanup()


def serve(
    url: str,
    study: str | None = None,
    *,
    port: int = 8080,
    data_dir: Path | None = None,
    ready: Callable[[str], None] = lambda _: None,
    secrets: Sequence[str] = (),
) -> None:
    """Serve until interrupted; ``ready`` hears the address of the page of ``study`` (the latest, without one).

    Raises:
        UsageError: no such study.
        EnvironmentLacks: a storage or a port that cannot be used.
    """
    from vopt.optimizer.study import list_studies, load

    with readable(url):
        named = load(storage_for(url, create=False), study).study_name
    path = source_path(url)
    beside = data_dir or (path.parent if path is not None else None)
    server = DashboardServer(url, lambda copy: list_studies(copy, data_dir=beside), port=port, secrets=secrets)
    try:
        ready(server.page_of(named))
        server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        server.close()
