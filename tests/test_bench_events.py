"""The benchmark of events runs, small."""

import json

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from bench import events


@pytest.mark.slow
@pytest.mark.long
def test_table_has_what_events_add_a_request_and_a_page(tmp_path, capsys):
    events.main(["--quick", "--rounds", "50", "--json", str(tmp_path / "table.json")])
    table = json.loads((tmp_path / "table.json").read_text())
    names = {row["name"] for row in table["rows"]}
    assert {"paced, added a page, on the clock", "paced, added a request, on the clock"} <= names
    assert "events/s" in capsys.readouterr().out
