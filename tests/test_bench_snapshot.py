"""The snapshot benchmark runs, small."""

import json

from bench import snapshot


def test_table_has_a_floor_beside_each_number(tmp_path, capsys):
    options = ["--mib", "4", "--folder", str(tmp_path), "--json", str(tmp_path / "table.json")]
    snapshot.main(options)
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["title"].startswith("4 MiB in 2 pages")
    ratios = {row["name"]: row["to"] for row in table["rows"] if row["ratio"] is not None}
    assert ratios == {"save": "the plain write", "load, new pool": "the plain read"}
    assert "GB/s" in capsys.readouterr().out
