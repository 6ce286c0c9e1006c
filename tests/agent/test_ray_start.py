"""What ``ray start`` is told and what its words mean. The outputs are Ray 2.60's own, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from pichak_agent.ray_start import RayStart, joined, refusal, refused_token

ADDRESS = "10.0.0.1:6379"
WRONG_TOKEN = """\
2026-11-30 14:42:25,831\tINFO scripts.py:1234 -- Local node IP: 192.0.2.2
[2026-11-30 14:42:25,900 W 32196 32196] gcs_client.cc:210: Failed to get cluster ID from GCS: \
Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect
"""
OTHER_VERSIONS = """\
RuntimeError: Version mismatch: The cluster was started with:
    Ray: 2.55.1
    Python: 3.11.7
This process on 10.0.0.9:0 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""
STARTED = "2026-11-30 14:44:23,673\tSUCC scripts.py:1251 -- Ray runtime started.\n"
HEAD_RESTARTED = (
    STARTED
    + """\
2026-11-30 14:47:25,414\tERR scripts.py:1303 -- Some Ray subprocesses exited unexpectedly:
2026-11-30 14:47:25,415\tERR scripts.py:110 --   raylet [exit code=1]
[2026-11-30 14:47:24,467 C 3306 3306] (raylet) node_manager.cc:524: GCS returned an authentication \
error. This may happen when GCS is not backed by a DB and restarted or there is data loss in the DB.
2026-11-30 14:47:25,416\tERR scripts.py:1315 -- Remaining processes will be killed.
"""
)
RAYLET_KILLED = (
    STARTED
    + """\
2026-11-30 14:47:25,414\tERR scripts.py:1303 -- Some Ray subprocesses exited unexpectedly:
2026-11-30 14:47:25,415\tERR scripts.py:110 --   raylet [exit code=-9]
2026-11-30 14:47:25,416\tERR scripts.py:1315 -- Remaining processes will be killed.
"""
)


@pytest.mark.parametrize(
    ("output", "code", "says", "settled"),
    [
        pytest.param(
            WRONG_TOKEN,
            None,
            "wants its token, and where Ray looks here there is none or another",
            True,
            id="wrong token",
        ),
        pytest.param(
            "ray.exceptions.AuthenticationError: Token authentication is enabled but no "
            "authentication token was found.",
            1,
            "name a file that holds it with --token-file",
            True,
            id="no token",
        ),
        pytest.param(
            OTHER_VERSIONS,
            1,
            "another Ray (Ray 2.55.1 there, 2.60.0 here; Python 3.11.7 there, 3.11.7 here)",
            True,
            id="field case 82",
        ),
        pytest.param(HEAD_RESTARTED, 1, "was started anew", False, id="field case 88"),
        pytest.param(RAYLET_KILLED, 1, "Ray's raylet ended (exit code -9)", False, id="killed"),
        pytest.param("python: No module named ray\n", 1, "Ray is not installed", True, id="no Ray"),
        pytest.param(
            "Usage: main.py start [OPTIONS]\nError: No such option: --frobnicate\n",
            2,
            "refuses its arguments: No such option: --frobnicate",
            True,
            id="an option that Ray has not",
        ),
        pytest.param(
            "Exception: No node info found for head node in GCS. Did the head node or gcs start "
            "successfully?",
            1,
            "is not ready yet",
            False,
            id="a head that is starting",
        ),
        pytest.param(
            "Exception: The current node timed out during startup. This could happen because some "
            "of the raylet failed to startup or the GCS has become overloaded.",
            1,
            "did not get ready here",
            False,
            id="a busy machine",
        ),
        pytest.param("", -9, "(`ray start` ended with -9): `pichak doctor`", False, id="nothing"),
        pytest.param(
            "one\nLookupError: two\n",
            1,
            "`pichak doctor` says what is missing (Ray's last words: LookupError: two)",
            False,
            id="what nobody knows",
        ),
        pytest.param(
            'Traceback (most recent call last):\n  File "x.py", line 3, in get_memory\n'
            "    return meminfo[b'MemTotal:']\nKeyError: b'MemTotal:'\n",
            1,
            "let this service read /proc/meminfo, which is masked or empty here (Ray's last words: "
            "KeyError: b'MemTotal:')",
            False,
            id="a masked /proc/meminfo",
        ),
        pytest.param(
            "[2026-11-30 14:42:25,900 W 32 32] gcs_client.cc:210: Failed to get cluster ID from "
            "GCS: Unavailable: Received http2 header with status: 404\n"
            "RuntimeError: Failed to connect to GCS.\n",
            1,
            "at 10.0.0.1:6379 is a web server and no Ray head: give --address the port",
            False,
            id="a web server",
        ),
        pytest.param(
            "OSError: [Errno 28] No space left on device: '/tmp/x'\n",
            1,
            "a file system is full",
            False,
            id="a full disk",
        ),
    ],
)
def test_why_a_cluster_did_not_take_it(
    output: str, code: int | None, says: str, settled: bool
) -> None:
    said = refusal(output, ADDRESS, code)
    assert says in said.sentence
    assert said.settled is settled
    assert "\n" not in said.sentence


def test_a_join_that_was_given_up_says_how_long_it_was_waited_for() -> None:
    said = refusal("INFO -- Local node IP: 10.0.0.9\n", ADDRESS, None, waited_seconds=180.0)
    assert said.why.startswith("Ray did not join the cluster at 10.0.0.1:6379 within 180 s")
    assert said.detail == "INFO -- Local node IP: 10.0.0.9"
    assert not said.settled


def test_a_file_with_a_wrong_token_is_named() -> None:
    said = refusal(WRONG_TOKEN, ADDRESS, None, token_file=Path("/etc/pichak/token"))
    assert "refuses the token in /etc/pichak/token: put the cluster's own there" in said.why
    assert said.settled


def test_a_refusal_after_the_join_is_not_the_tokens() -> None:
    assert joined(HEAD_RESTARTED)
    assert not joined(WRONG_TOKEN)
    assert refused_token(WRONG_TOKEN)
    assert not refused_token(HEAD_RESTARTED)


def test_the_token_is_in_no_argument_and_no_variable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret")
    how = RayStart(ADDRESS, file, "gpu-a", {"k": "v", "l": "w"}, '{"x": 1}', 2, 0)
    arguments = how.arguments(tmp_path / "ray")
    variables = how.variables(
        {"RAY_AUTH_TOKEN": "other", "RAY_ADDRESS": "x:1", "A": "b"}, {"M": "n"}
    )
    assert "s3cret" not in " ".join([*arguments, *variables.values()])
    assert "RAY_AUTH_TOKEN" not in variables
    assert "RAY_ADDRESS" not in variables
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(file)
    assert (variables["A"], variables["M"], variables["RAY_AUTH_MODE"]) == ("b", "n", "token")
    assert f"--address={ADDRESS}" in arguments
    assert "--labels=k=v,l=w" in arguments
    assert {"--num-cpus=2", "--num-gpus=0", "--node-name=gpu-a", "--block"} <= set(arguments)


def test_without_a_token_file_the_users_own_way_stays() -> None:
    own = {"RAY_AUTH_TOKEN": "theirs"}
    assert RayStart(ADDRESS).variables(own, {})["RAY_AUTH_TOKEN"] == "theirs"


def test_a_token_where_ray_looks_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an address that is named Ray 2.60 shows it only where RAY_AUTH_MODE says so, and without
    one it ends where it is told to show one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("t")

    def mode(**own: str) -> str | None:
        return RayStart(ADDRESS).variables(own, {}).get("RAY_AUTH_MODE")

    assert mode() is None
    assert mode(RAY_AUTH_TOKEN_PATH=str(tmp_path / "none")) is None
    assert mode(RAY_AUTH_TOKEN="t") == "token"
    assert mode(RAY_AUTH_TOKEN_PATH=str(tmp_path / "token")) == "token"
    assert mode(RAY_AUTH_TOKEN="t", RAY_AUTH_MODE="disabled") == "disabled"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    assert mode() == "token"
