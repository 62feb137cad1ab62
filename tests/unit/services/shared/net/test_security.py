"""Keys on disk, the peers that may use each, and where plaintext is allowed."""

import stat
from pathlib import Path

import pytest
import structlog
import zmq

from gspo_services.shared.net.authenticator import Penalties
from gspo_services.shared.net.security import (
    PLAINTEXT,
    AllowList,
    KeyFileError,
    OwnKey,
    Security,
    key_role,
    read_public_keys,
    write_key_pair,
)
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.settings.exposure import is_private
from gspo_services.shared.settings.sections import SecuritySection
from tests.support.wire.keys import make_keys, secrets_in, security_of

A, B, C, D = (bytes([letter]) * 40 for letter in b"ABCD")


# --- key files -----------------------------------------------------------------------------------------------------------


def test_only_its_owner_can_read_a_secret_key_and_no_key_is_overwritten(tmp_path: Path) -> None:
    secret, public = write_key_pair(tmp_path / "keys", "rollout-7", overwrite=False)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert zmq.curve_public(secret.read_bytes().strip()) == public.read_bytes().strip()
    before = secret.read_bytes()
    with pytest.raises(KeyFileError, match=r"rollout-7\.secret exists already.*--force"):
        write_key_pair(tmp_path / "keys", "rollout-7", overwrite=False)
    assert secret.read_bytes() == before
    write_key_pair(tmp_path / "keys", "rollout-7", overwrite=True)
    assert secret.read_bytes() != before
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["rollout-7.public", "rollout-7.secret"]


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o440, False), (0o604, True)])
def test_a_secret_key_that_everybody_can_read_is_used_with_a_warning(mode: int, warned: bool, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    (keys / "rollout.secret").chmod(mode)
    with structlog.testing.capture_logs() as logged:
        assert Security.load(SecuritySection(keys=str(keys)), "rollout").own is not None
    said = [entry for entry in logged if entry["event"] == "secret_key_readable_by_everybody"]
    assert [entry["file"] for entry in said] == [str(keys / "rollout.secret")] * warned


@pytest.mark.parametrize("name", ["", "rolout", "rollout7", "rollout-", "rollout-../x", "broker/x", "rollout-a b"])
def test_a_name_without_a_role_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a role"):
        write_key_pair(tmp_path, name, overwrite=False)


def test_a_name_begins_with_its_role() -> None:
    assert [key_role(name) for name in ("broker", "rollout-7", "operator-alice.x_1")] == ["broker", "rollout", "operator"]


def test_public_keys_are_read_by_name(tmp_path: Path) -> None:
    make_keys(tmp_path, ["broker", "rollout-1"])
    (tmp_path / "..data").mkdir()
    assert sorted(read_public_keys(tmp_path).values()) == ["broker", "rollout-1"]


def test_an_error_names_a_broken_key_file_and_not_its_content(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "rollout.public").write_text("TOPSECRET")
    with pytest.raises(KeyFileError, match=r"rollout\.public: holds 9 characters, a key has 40") as caught:
        read_public_keys(tmp_path)
    assert "TOPSECRET" not in str(caught.value)
    (tmp_path / "rollout.public").write_text('"' * 40)
    with pytest.raises(KeyFileError, match="is not a key in Z85"):
        read_public_keys(tmp_path)
    (tmp_path / "rollout.public").write_bytes((tmp_path / "broker.public").read_bytes())
    with pytest.raises(KeyFileError, match="hold the same key"):
        read_public_keys(tmp_path)
    (tmp_path / "rollout.public").unlink()
    (tmp_path / "stranger.public").touch()
    with pytest.raises(KeyFileError, match=r"stranger\.public.*expected a role"):
        read_public_keys(tmp_path)


def test_a_process_uses_the_key_of_its_name_and_otherwise_that_of_its_role(tmp_path: Path) -> None:
    make_keys(tmp_path, ["broker", "rollout", "rollout-7"])

    def own(name: str) -> OwnKey:
        key = security_of(tmp_path, "rollout", name).own
        assert key is not None
        return key

    assert own("rollout-7").name == "rollout-7"
    assert own("rollout-8").name == own("some pod").name == "rollout"
    assert own("rollout-7").public == (tmp_path / "rollout-7.public").read_bytes().strip()


def test_no_text_of_an_object_holds_its_secret(tmp_path: Path) -> None:
    security = security_of(make_keys(tmp_path), "learner")
    assert not [secret for secret in secrets_in(tmp_path) if secret in f"{security!r} {security.own}"]


def test_missing_keys_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    make_keys(tmp_path, ["broker"])
    with pytest.raises(ConfigurationError, match=r"keys: .*learner\.secret: No such file.*gspo keys"):
        security_of(tmp_path, "learner")
    with pytest.raises(ConfigurationError, match=r"absent/learner\.secret: No such file"):
        Security.load(SecuritySection(keys=str(tmp_path / "absent")), "learner")


LISTED = AllowList({A: "rollout", B: "rollout-a", C: "learner", D: "rollout-a-3"})


def test_a_channel_admits_the_listed_keys_of_its_roles() -> None:
    assert [LISTED.admits(key, ("rollout",)) for key in (A, B, C, D, b"E" * 40)] == [True, True, False, True, False]
    assert LISTED.admits(C, ("learner", "operator"))


@pytest.mark.parametrize(
    ("key", "role", "peer", "part"),
    [
        (A, "rollout", "rollout-0", ""),
        (A, "rollout", "anything", ""),
        (A, "rollout", "rollout-a", "the key rollout cannot speak for rollout-a, which has the key rollout-a"),
        (A, "rollout", "rollout-a-1", "which has the key rollout-a"),
        (A, "rollout", "rollout-ab", ""),
        (B, "rollout", "rollout-a", ""),
        (B, "rollout", "rollout-a-1", ""),
        (B, "rollout", "rollout-a-3", "which has the key rollout-a-3"),
        (B, "rollout", "rollout-b", "the key rollout-a cannot speak for rollout-b, which has the key rollout"),
        (D, "rollout", "rollout-a-3", ""),
        (A, "learner", "learner", "the key rollout belongs to a rollout and cannot act as a learner"),
        (C, "rollout", "learner", "belongs to a learner"),
        (b"E" * 40, "rollout", "rollout-0", "not in the allow-list"),
    ],
)
def test_a_key_speaks_for_its_role_and_its_name(key: bytes, role: str, peer: str, part: str) -> None:
    objection = LISTED.objection(key, role, peer)  # type: ignore[arg-type]
    assert part in objection
    assert bool(part) == bool(objection)


def test_a_list_is_replaced_as_a_whole() -> None:
    listed = AllowList({A: "rollout"})
    listed.replace({B: "rollout"})
    assert (listed.admits(A, ("rollout",)), listed.admits(B, ("rollout",))) == (False, True)


# --- plaintext ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "private"),
    [
        ("tcp://127.0.0.1:7001", True),
        ("tcp://127.1.2.3:7001", True),
        ("tcp://localhost:7001", True),
        ("tcp://[::1]:7001", True),
        ("ipc:///run/gspo/work", True),
        ("inproc://work", True),
        ("tcp://0.0.0.0:7001", False),
        ("tcp://*:7001", False),
        ("tcp://[::]:7001", False),
        ("tcp://10.0.0.1:7001", False),
        ("tcp://broker:7001", False),
        ("tcp://127.0.0.1.example.com:7001", False),
        ("tcp://localhost.example.com:7001", False),
        ("tcp://eth0:7001", False),
    ],
)
def test_only_endpoints_of_this_host_are_private(endpoint: str, private: bool) -> None:
    assert is_private(endpoint) is private
    assert bool(Security().objection(endpoint)) is not private
    assert Security(allow_plaintext=True).objection(endpoint) == ""


@pytest.mark.parametrize("key", ["broker.work_endpoint", "broker.batch_endpoint", "learner.advertised_weights_endpoint"])
def test_a_configuration_that_opens_a_plaintext_port_is_refused_with_both_remedies(key: str) -> None:
    opened = f"{key}=tcp://10.0.0.1:7001"
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None, [opened], {})
    for part in (f"{key} is 'tcp://10.0.0.1:7001'", "set security.keys", "gspo keys DIRECTORY", "allow_plaintext = true"):
        assert part in str(caught.value)
    load_settings(None, [opened, "security.keys=keys"], {})
    load_settings(None, [opened, "security.allow_plaintext=true"], {})


# --- penalties -----------------------------------------------------------------------------------------------------------


def test_a_peer_that_sends_too_much_garbage_is_ignored_for_a_while() -> None:
    penalties = Penalties()
    good, bad = ("work", b"good"), ("work", b"bad")
    assert not any(penalties.offend(bad, 0.0) for _ in range(32))
    assert not penalties.active
    assert penalties.offend(bad, 0.0)
    assert (penalties.ignores(bad, 9.9), penalties.ignores(good, 9.9)) == (True, False)
    assert not penalties.ignores(bad, 10.0)
    assert not penalties.active


def test_a_bad_message_now_and_then_is_forgiven() -> None:
    penalties = Penalties()
    assert not any(penalties.offend(("work", b"clumsy"), float(second)) for second in range(500))


def test_a_named_binding_end_is_connected_to_only_under_a_key_of_its_role(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    security = security_of(keys, "rollout")
    public = {role: (keys / f"{role}.public").read_text().strip() for role in ("rollout", "operator")}
    assert security.with_server("rollout", public["rollout"]).server_key("rollout") == public["rollout"].encode()
    for stranger in (public["operator"], "k" * 40, ""):
        with pytest.raises(KeyFileError, match="is not that of a rollout"):
            security.with_server("rollout", stranger)
    assert PLAINTEXT.with_server("rollout", "") is PLAINTEXT
    with pytest.raises(KeyFileError, match="this process has none"):
        PLAINTEXT.with_server("rollout", public["rollout"])
