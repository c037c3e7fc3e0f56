"""The tenants file: what it may say, and the words for what it may not."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from tests.server.conftest import MakeApp

from pellucid.core.errors import ConfigError
from pellucid.core.tenants import Tenant
from pellucid.server.access import ANYONE, Access, Caller, KnownKey, key_digest
from pellucid.server.errors import ApiError
from pellucid.server.tenants import TenantEntry, add_operator, add_tenant, new_key, parse_tenants, read_tenants

PAGE = Path(__file__).parents[2] / "docs" / "tenants.md"
HASH = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32


def test_the_example_of_the_page_is_a_tenants_file(make_app: MakeApp, tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tenants.toml").write_text(example)
    assert str(make_app(tenants=tmp_path / "tenants.toml").state.tenancy.roster).startswith(
        "2 tenants, helpdesk shared"
    )
    file = parse_tenants(example, "the page")
    acme, lab = file.entries
    assert acme.tenant == Tenant(
        "acme",
        weight=2.0,
        priority_ceiling=-10,
        max_running=32,
        max_waiting=200,
        tokens_per_minute=200_000,
        kv_share=0.5,
    )
    assert lab.tenant == Tenant("lab")
    assert (len(acme.keys), len(lab.keys), len(file.operator_keys)) == (1, 2, 1)
    assert acme.public_prefixes == lab.public_prefixes == ("helpdesk",)
    assert file.public_prefixes["helpdesk"].startswith("You are the help desk")
    limits = set(Tenant.__dataclass_fields__) - {"name"}
    assert all(f"| `{limit}` |" in PAGE.read_text(encoding="utf-8") for limit in limits), "a limit is not explained"


WRONG = {
    "not TOML": ("x", "t.toml is not TOML: "),
    "unknown table": ("[tenant.a]", "t.toml: the file has an unknown key 'tenant'; keys are operator, "),
    "no table": ("tenants = 3", r"tenants is 3; it must be a table, \[tenants\]"),
    "a tenant that is no table": ("tenants.a = 3", r"tenants.a is 3; it must be a table, \[tenants.a\]"),
    "a name": (f'[tenants."a b"]\nkeys = ["{HASH}"]', "named 'a b'; a name has 1 to 64 letters"),
    "the reserved name": (f'[tenants.default]\nkeys = ["{HASH}"]', "'default', which is the tenant of --api-key"),
    "no keys": ("[tenants.a]", r"\[tenants.a\] keys must be a list of key hashes; `pellucid tenant key` makes one"),
    "an empty list": ("[tenants.a]\nkeys = []", r"\[tenants.a\] keys must be a list"),
    "an empty operator": ("[operator]", r"\[operator\] keys must be a list"),
    "an operator without keys": ("operator.keys = []", r"\[operator\] keys must be a list"),
    "a key that two claim": (
        f'[tenants.a]\nkeys = ["{HASH}"]\n[tenants.b]\nkeys = ["{OTHER}", "{HASH}"]',
        r"\[tenants.b\] keys holds a key of \[tenants.a\]; a key has one owner",
    ),
    "the operator's key": (
        f'operator.keys = ["{HASH}"]\n[tenants.a]\nkeys = ["{HASH}"]',
        r"\[tenants.a\] keys holds a key of \[operator\]",
    ),
    "an unknown key": (
        f'[tenants.a]\nkeys = ["{HASH}"]\nwieght = 2',
        r"\[tenants.a\] has an unknown key 'wieght'; keys are keys, weight",
    ),
    "a text for a number": (
        f'[tenants.a]\nkeys = ["{HASH}"]\nweight = "heavy"',
        r"\[tenants.a\] weight is 'heavy'; it must be a number",
    ),
    "a truth for a number": (
        f'[tenants.a]\nkeys = ["{HASH}"]\nmax_running = true',
        "max_running is True; .* whole number",
    ),
    "a fraction": (
        f'[tenants.a]\nkeys = ["{HASH}"]\nmax_waiting = 1.5',
        "max_waiting is 1.5; it must be a whole number",
    ),
    "out of range": (f'[tenants.a]\nkeys = ["{HASH}"]\nkv_share = 2', "tenant 'a': kv_share is 2; it must lie in"),
    "an undeclared prefix": (
        f'[public_prefixes]\np = "text"\n[tenants.a]\nkeys = ["{HASH}"]\npublic_prefixes = ["q"]',
        r"public_prefixes is \['q'\]; it must be a list of names from \[public_prefixes\] \(p\)",
    ),
    "a list of lists": (
        f'[tenants.a]\nkeys = ["{HASH}"]\npublic_prefixes = [["q"]]',
        r"public_prefixes is \[\['q'\]\]; it must be a list of names",
    ),
    "an empty prefix": ('[public_prefixes]\np = ""', r"\[public_prefixes\] p is ''; it must be the text"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_tenants(text, "t.toml")
    assert str(caught.value).startswith("t.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", ['"plk-secret"', '["plk-secret"]', '[["plk-secret"]]'])
def test_a_key_that_was_pasted_into_the_file_is_not_repeated(keys: str) -> None:
    with pytest.raises(ConfigError, match=r"\[tenants.a\] keys") as caught:
        parse_tenants(f"[tenants.a]\nkeys = {keys}", "t.toml")
    assert "plk-secret" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        read_tenants(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_tenants(tmp_path / "latin.toml")


def test_what_is_added_is_read_back_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('# ours\n[public_prefixes]\np = "text"  # said to all\n')
    path.chmod(0o640)
    acme = TenantEntry(Tenant("acme", weight=0.25, priority_ceiling=-1, kv_share=0.5), (key_digest("k"),), ("p",))
    lab = TenantEntry(Tenant("lab"), (key_digest("l"),))
    add_tenant(path, acme)
    add_operator(path, key_digest("o"))
    add_tenant(path, lab)
    file = read_tenants(path)
    assert file.entries == (acme, lab)
    assert file.operator_keys == (key_digest("o"),)
    assert path.read_text().startswith('# ours\n[public_prefixes]\np = "text"  # said to all\n')
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["tenants.toml"], "something was left behind"


def test_a_new_file_is_its_owners_and_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.toml", tmp_path / "tenants.toml"
    link.symlink_to(target)
    add_tenant(link, TenantEntry(Tenant("a"), (key_digest("k"),)))
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_added_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    add_tenant(path, TenantEntry(Tenant("a"), (key_digest("k"),)))
    add_operator(path, key_digest("o"))
    before = path.read_text()
    for entry, message in (
        (TenantEntry(Tenant("a"), (key_digest("m"),)), "has a tenant 'a' already.*pellucid tenant key"),
        (TenantEntry(Tenant("b"), (key_digest("k"),)), "a key has one owner"),
        (TenantEntry(Tenant("b"), (key_digest("m"),), ("p",)), "which declares none"),
        (TenantEntry(Tenant("b]\n"), (key_digest("m"),)), "a name has"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_tenant(path, entry)
    with pytest.raises(ConfigError, match="an operator key already"):
        add_operator(path, key_digest("p"))
    assert path.read_text() == before
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere/t.toml"):
        add_operator(tmp_path / "nowhere" / "t.toml", key_digest("p"))
    path.write_text("tenants = { a = 3 }")
    with pytest.raises(ConfigError, match=r"tenants\.a is 3"):
        add_operator(path, key_digest("p"))


def test_a_tenant_cannot_be_added_beside_an_inline_table(tmp_path: Path) -> None:
    """TOML lets nobody extend one, and the file stays as it was."""
    path = tmp_path / "tenants.toml"
    path.write_text(f'tenants = {{ a = {{ keys = ["{HASH}"] }} }}\n')
    with pytest.raises(ConfigError, match="is not TOML"):
        add_tenant(path, TenantEntry(Tenant("b"), (key_digest("k"),)))
    assert read_tenants(path).entries[0].tenant.name == "a"


def test_keys_are_chance_and_known_by_their_hash() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for made in keys:
        assert len(made.key) >= 43
        assert made.hash == "sha256:" + hashlib.sha256(made.key.encode()).hexdigest()


def test_a_key_is_its_callers_alone() -> None:
    callers = [Caller(None, is_operator=True), Caller("a"), Caller("b")]
    keys = [f"key-{i}" for i in range(len(callers))]
    access = Access([KnownKey(key_digest(key), caller) for key, caller in zip(keys, callers)])
    for key, caller in zip(keys, callers):
        assert access.identify(f"Bearer {key}") == caller
        assert access.identify(f"bearer  {key} ") == caller
    refusals = set()
    for header in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer key",
        "Bearer key-",
        "Bearer key-00",
        "Basic key-0",
        "key-0",
        "Bearer é",
    ):
        with pytest.raises(ApiError) as caught:
            access.identify(header)
        refusals.add((caught.value.status, str(caught.value), caught.value.code))
    assert len(refusals) == 1, "a refusal says more than another"


def test_without_keys_everyone_is_welcome_and_with_an_empty_list_nobody_is() -> None:
    assert Access(None).identify("") == ANYONE
    with pytest.raises(ApiError):
        Access([]).identify("Bearer ")


def test_who_may_see_what() -> None:
    assert Caller("a").may_see("a")
    assert not Caller("a").may_see("b")
    assert not Caller("a").may_see("")
    assert Caller(None, is_operator=True).may_see("a")
