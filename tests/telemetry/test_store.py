"""The store keeps what it is given, forgets what is old or too much, and is read without the server."""

from __future__ import annotations

import sqlite3
import stat
import time

import pytest
from tests.telemetry.reports import BEHIND_A_DOCUMENT, WRITING, report, stored

from pellucid.telemetry.store import Store, StoreError, StoreReader


def write(path, requests, **bounds):
    store = Store(path, **bounds)
    for request in requests:
        store.put(request)
    store.close()
    assert store.num_dropped == 0


def test_what_is_put_is_read_back_whole(tmp_path):
    path = tmp_path / "deep" / "store.sqlite"
    asked = [stored("a", BEHIND_A_DOCUMENT, tenant="x", at=time.time()), stored("b", WRITING, at=time.time())]
    write(path, asked)
    reader = StoreReader(path)
    assert reader.get("a") == asked[0]
    assert reader.get("nobody") is None
    assert [r.id for r in reader.slowest(1)] == ["b"]
    assert [r.id for r in reader.all(tenant="x")] == ["a"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_id_may_be_cut_short_where_it_is_still_one(tmp_path):
    path = tmp_path / "store.sqlite"
    write(path, [stored(name, WRITING, at=time.time()) for name in ("cmpl-12", "cmpl-13", "cmpl-2")])
    reader = StoreReader(path)
    assert reader.get("cmpl-2") is not None
    assert reader.get("cmpl-1") is None
    found = reader.get("cmpl-12")
    assert found is not None
    assert found.id == "cmpl-12"


def test_only_what_is_recent_is_asked_for_and_only_what_is_young_is_kept(tmp_path):
    path = tmp_path / "store.sqlite"
    now = time.time()
    write(path, [stored("new", WRITING, at=now), stored("old", WRITING, at=now - 500), stored("gone", WRITING, at=0.0)])
    reader = StoreReader(path)
    assert [r.id for r in reader.all()] == ["new", "old"]
    assert [r.id for r in reader.all(since=now - 60)] == ["new"]


def test_the_oldest_go_when_the_file_is_full(tmp_path):
    path = tmp_path / "store.sqlite"
    now = time.time()
    write(path, [stored(f"r{i:04}", WRITING, at=now - 1000 + i) for i in range(1000)], max_bytes=200_000)
    kept = [r.id for r in StoreReader(path).all()]
    assert 100 < len(kept) < 600
    assert kept[0] == "r0999"
    assert kept == sorted(kept, reverse=True)


def test_what_is_no_store_is_said_in_one_line(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello, this is not a database at all" * 10)
    with pytest.raises(StoreError, match=r"notes.txt.*--store"):
        Store(text)
    with pytest.raises(StoreError, match="there is no store"):
        StoreReader(tmp_path / "nothing")
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("PRAGMA user_version = 77")
    connection.close()
    with pytest.raises(StoreError, match="version 77"):
        Store(other)


def test_a_disk_that_fails_costs_rows_and_nothing_else(tmp_path, caplog):
    store = Store(tmp_path / "store.sqlite")
    connection = sqlite3.connect(store.path)
    connection.execute("DROP TABLE requests")
    connection.commit()
    store.put(stored("a", report({"engine.gap": 1.0})))
    store.close()
    assert store.num_dropped == 1
    assert "no such table" in caplog.text
