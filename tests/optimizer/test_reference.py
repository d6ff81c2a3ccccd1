"""The reference says what the program does: generated pages are up to date, written ones name every field."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sample_study import study

from vopt.optimizer import errors
from vopt.optimizer.report.document import list_document, study_document
from vopt.optimizer.report.view import StudyView

DOCS = Path(__file__).parents[2] / "docs"


def test_the_command_line_page_is_up_to_date() -> None:
    names = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"],
        env={**os.environ, "PYTHONPATH": names},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_field_of_a_document_is_explained() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", (DOCS / "reference" / "documents.md").read_text()))
    view = StudyView.of(study())
    document = study_document(view)
    fields = {*document, *document["starts"][0], *document["comparison"][0], *document["trials"]}
    fields |= {*document["gain"], *document["winner"], *document["overrides"][0], *document["rejected"][0]}
    fields |= {*document["success"], *list_document([view]), *list_document([view])["studies"][0]}
    assert fields - named == set()


def test_every_error_is_explained_with_its_exit_code() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.VoptError) and cls is not errors.VoptError:
            assert f"| `{name}` | {cls.exit_code} |" in page
