"""The sidecar against the real wandb, without a network: what it writes, and that it never holds or fails a run."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import wandb

from orchestrator import tracking, wandb_sidecar
from orchestrator.spec import RunSpec
from orchestrator.tracking import TrackingRecord
from tests.specs import run_spec
from train.report import STEPS_FILE, StepReport, TrainReport, append_step, write_json

PREDICTED, MEASURED = 1100, 1000
PROMISE_S = 35  # 30 s, and the start of a process on a busy machine


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment without a key for wandb, and without this machine's settings of it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    home = tmp_path / "home"
    home.mkdir()
    return kept | {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_CONFIG_DIR": str(home)}


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Address of a server that accepts and never answers."""
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


class AnsweringServer(BaseHTTPRequestHandler):
    """As much of wandb's server as a run needs; `streamed` keeps what it was sent."""

    streamed: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            query = json.loads(body)
            project = {"id": "p", "name": "orchestrator", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "r", "name": query["variables"].get("name"), "displayName": "run", "project": project}
            files = {"runID": "r", "uploadHeaders": [], "files": []}
            known = {
                "upsertBucket": {"bucket": bucket, "inserted": True},
                "createRunFiles": files,
            }
            answer = {"data": {name: value for name, value in known.items() if name in query["query"]}}
        elif self.path.endswith("/file_stream"):
            self.streamed.append(json.loads(body))
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def answering_server() -> Iterator[str]:
    """Address of a server that takes a run."""
    AnsweringServer.streamed.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), AnsweringServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def planned(run_dir: Path, *overrides: str) -> RunSpec:
    """A run folder as the launcher leaves it."""
    run_dir.mkdir()
    spec = run_spec("model=tiny", "ckpt=none", "tracking=wandb", *overrides)
    spec = spec.model_copy(update={"name": run_dir.name})
    (run_dir / "spec.json").write_text(spec.model_dump_json())
    (run_dir / "plan.json").write_text(json.dumps({"estimate": {"peak_device_bytes": PREDICTED}}))
    return spec


def train_step(run_dir: Path, step: int, attempt: int = 1) -> None:
    """What the trainer leaves of a step."""
    known = {
        "attempt": attempt,
        "step": step,
        "tokens": step * 512,
        "loss": 6.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "step_time_s": 0.1,
        "tokens_per_s": 5120.0,
        "rss_growth_bytes": 900,
        "eval_loss": None if step % 2 else 5.5,
        "wall_time_s": step * 0.1,
    }
    report = StepReport.model_validate(dict.fromkeys(StepReport.model_fields) | known)
    append_step(run_dir / STEPS_FILE, report)


def train_end(run_dir: Path, attempt: int = 1) -> None:
    """What the trainer leaves at the end."""
    known = {
        "attempt": attempt,
        "outcome": "completed",
        "stop_reason": "budget.max_steps=3",
        "steps": 3,
        "tokens": 1536,
        "predicted_peak_bytes": PREDICTED,
        "measured_peak_bytes": MEASURED,
        "wall_time_s": 0.3,
        "device_hours": 0.0001,
        "data_fingerprint": "d",
        "eval_fingerprint": "e",
        "torch_version": "2",
        "world_size": 1,
    }
    report = TrainReport.model_validate(dict.fromkeys(TrainReport.model_fields) | known)
    write_json(run_dir / f"report.{attempt}.json", report.model_dump_json())


def track(run_dir: Path, spec: RunSpec, env: Mapping[str, str], attempt: int = 1) -> str | None:
    """A tracked attempt of three steps; the warning."""
    tracker = tracking.start(run_dir, attempt, spec, env)
    assert tracker is not None
    for step in (1, 2, 3):
        train_step(run_dir, step, attempt)
    train_end(run_dir, attempt)
    return tracker.finish(spec.tracking.timeout_s)


def record(run_dir: Path, attempt: int = 1) -> TrackingRecord:
    """What the sidecar says became of the attempt."""
    return TrackingRecord.model_validate_json(tracking.record_file(run_dir, attempt).read_text())


def inspect(run_dir: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """Records of wandb's own file of an attempt, read by wandb's own reader."""
    folder = record(run_dir, attempt).folder
    assert folder is not None
    (file,) = Path(folder).glob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in text.splitlines()]


def run_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of the run itself: name, id, config."""
    (run,) = [r["run"] for r in records if r["type"] == "run"]
    assert isinstance(run, dict)
    return run


def history_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged, in order."""
    return [r["history"]["item"] for r in records if r["type"] == "history"]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary at the end."""
    updates = [r["summary"].get("update", {}) for r in records if r["type"] == "summary"]
    return {key: value for update in updates for key, value in update.items()}


def steps_of(records: list[dict[str, Any]]) -> list[int]:
    """Steps that were logged."""
    return [item["global_step"] for item in history_of(records)]


def with_server(env: Mapping[str, str], address: str) -> dict[str, str]:
    """With a key, and this address for wandb's server."""
    return dict(env) | {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": address}


def wandb_without_core(folder: Path, core: str | None) -> Path:
    """A wandb package to import from `folder`, whose binary is this script, or is missing."""
    package = folder / "wandb"
    package.mkdir(parents=True)
    (real,) = wandb.__path__
    for path in Path(real).iterdir():
        if path.name != "bin":
            (package / path.name).symlink_to(path)
    (package / "bin").mkdir()
    if core is not None:
        (package / "bin" / "wandb-core").write_text(core)
        (package / "bin" / "wandb-core").chmod(0o755)
    return folder


def stub_wandb(folder: Path, source: str) -> Path:
    """A module `wandb` of this source to import from `folder`."""
    folder.mkdir()
    (folder / "wandb.py").write_text(source)
    return folder


def printed(run_dir: Path) -> str:
    """What the sidecars of a run printed."""
    return "".join(path.read_text() for path in sorted(run_dir.glob("logs/tracking.*.log")))


def alive(run_dir: Path) -> list[str]:
    """Command lines of processes that still work on this run."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if str(run_dir) in words or str(run_dir) in process.environ().get("WANDB_DIR", ""):
                found.append(words)
        except psutil.Error:
            continue
    return found


def test_without_a_key_an_offline_run_holds_config_history_and_both_peaks(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "tiny-none-b4"
    spec = planned(run_dir, "model.num_layers=3", "tracking.group=sweep-a", "tracking.tags=[mine]")

    assert track(run_dir, spec, env) is None

    records = inspect(run_dir)
    run = run_of(records)
    assert record(run_dir).mode == "offline"
    assert run["display_name"] == "tiny-none-b4"
    assert run["project"] == "orchestrator"
    assert run["run_group"] == "sweep-a"
    assert {"mine", "model=tiny", "ckpt=none"} <= set(run["tags"])
    config = run["config"]["update"]
    assert config["model"]["num_layers"] == 3
    assert config["train"]["micro_batch"] == spec.train.train.micro_batch
    assert config["choices"]["ckpt"] == "none"
    assert config["overrides"][0] == "model=tiny"
    history = history_of(records)
    assert [item["global_step"] for item in history] == [1, 2, 3]
    assert [item["train/loss"] for item in history] == [6.0, 3.0, 2.0]
    assert [item.get("eval/loss") for item in history] == [None, 5.5, None]
    assert {"train/lr", "train/grad_norm", "train/tokens", "perf/tokens_per_s", "perf/step_time_s"} <= set(history[0])
    assert history[0]["mem/rss_growth_bytes"] == 900
    assert "perf/mfu" not in history[0]
    assert {"name": "global_step", "options": {"defined": True}} in [r["metric"] for r in records if "metric" in r]
    assert [r["metric"].get("step_metric") for r in records if "metric" in r] == [None, "global_step"]
    summary = summary_of(records)
    assert summary["mem/predicted_peak_bytes"] == PREDICTED
    assert summary["mem/measured_peak_bytes"] == MEASURED
    assert summary["mem/prediction_error"] == pytest.approx(0.1)
    assert "wandb sync" in tracking.log_file(run_dir, 1).read_text()


def test_with_a_key_the_run_is_sent_to_the_server(tmp_path: Path, env: dict[str, str], answering_server: str) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)

    assert track(run_dir, spec, with_server(env, answering_server)) is None

    assert record(run_dir).mode == "online"
    assert (
        record(run_dir).url == f"{answering_server}/me/orchestrator/runs/{(run_dir / 'wandb_id').read_text().strip()}"
    )
    parts = [part["files"] for part in AnsweringServer.streamed if "files" in part]
    history = [line for files in parts for line in files.get("wandb-history.jsonl", {}).get("content", [])]
    assert [json.loads(line)["global_step"] for line in history] == [1, 2, 3]
    summary = [line for files in parts for line in files.get("wandb-summary.json", {}).get("content", [])]
    assert json.loads(summary[-1])["mem/measured_peak_bytes"] == MEASURED


def test_a_second_attempt_keeps_the_id_and_logs_its_own_steps_only(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    assert track(run_dir, spec, env) is None
    first = (run_dir / "wandb_id").read_text()
    time.sleep(1)  # wandb names its folders by the second

    assert track(run_dir, spec, env, attempt=2) is None

    assert (run_dir / "wandb_id").read_text() == first
    ids = [run_of(inspect(run_dir, attempt))["run_id"] for attempt in (1, 2)]
    assert ids == [first.strip()] * 2
    assert steps_of(inspect(run_dir, 2)) == [1, 2, 3]


def test_variables_of_the_user_win(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir, "tracking.project=ours", "tracking.group=ours")
    theirs = {
        "WANDB_PROJECT": "theirs",
        "WANDB_ENTITY": "them",
        "WANDB_NAME": "their-name",
        "WANDB_RUN_GROUP": "their-group",
        "WANDB_TAGS": "their-tag",
        "WANDB_RUN_ID": "theirid1",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_DIR": str(tmp_path / "elsewhere"),
    }

    assert track(run_dir, spec, env | theirs) is None

    run = run_of(inspect(run_dir))
    assert (run["project"], run["entity"], run["display_name"]) == ("theirs", "them", "their-name")
    assert (run["run_group"], run["tags"], run["run_id"]) == ("their-group", ["their-tag"], "theirid1")
    assert str(record(run_dir).folder).startswith(theirs["WANDB_DIR"])
    assert (run_dir / "wandb_id").read_text() == "theirid1\n"


def test_a_disabled_wandb_is_no_warning(tmp_path: Path, env: dict[str, str]) -> None:
    spec = planned(tmp_path / "run")
    assert track(tmp_path / "run", spec, env | {"WANDB_MODE": "disabled"}) is None
    assert record(tmp_path / "run").mode == "disabled"


def test_tracking_none_starts_nothing(tmp_path: Path) -> None:
    spec = planned(tmp_path / "run", "tracking=none")
    assert tracking.start(tmp_path / "run", 1, spec) is None
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["plan.json", "spec.json"]


def test_a_failed_run_has_its_predicted_peak(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    tracker = tracking.start(run_dir, 1, spec, env)
    assert tracker is not None
    train_step(run_dir, 1)
    write_json(run_dir / "failure.1.rank0.json", "{}")

    assert tracker.finish(spec.tracking.timeout_s) is None

    records = inspect(run_dir)
    assert summary_of(records)["mem/predicted_peak_bytes"] == PREDICTED
    assert "mem/measured_peak_bytes" not in summary_of(records)
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [1]


def test_a_closed_port_gives_one_warning_and_an_offline_run(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir, "tracking.timeout_s=12")
    check_falls_back(run_dir, spec, with_server(env, "http://127.0.0.1:1"))


def test_a_server_that_never_answers_gives_one_warning_and_an_offline_run(
    tmp_path: Path, env: dict[str, str], silent_server: str
) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir, "tracking.timeout_s=12")
    check_falls_back(run_dir, spec, with_server(env, silent_server))


def test_a_malformed_key_gives_one_warning_and_an_offline_run(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    check_falls_back(run_dir, planned(run_dir), env | {"WANDB_API_KEY": "short"})


def test_online_asked_for_without_a_key_gives_one_warning_and_an_offline_run(
    tmp_path: Path, env: dict[str, str]
) -> None:
    run_dir = tmp_path / "run"
    check_falls_back(run_dir, planned(run_dir), env | {"WANDB_MODE": "online"})


def check_falls_back(run_dir: Path, spec: RunSpec, env: Mapping[str, str]) -> None:
    """One warning that names the way out, and all data in an offline run."""
    began = time.monotonic()
    warning = track(run_dir, spec, env)
    assert time.monotonic() - began < PROMISE_S
    assert warning is not None
    assert "\n" not in warning
    folder = record(run_dir).folder
    for part in ("tracking=none", "WANDB_MODE=offline", str(run_dir / STEPS_FILE), f"wandb sync {folder}"):
        assert part in warning
    assert "offline-run" in str(folder)
    records = inspect(run_dir)
    assert run_of(records)["run_id"] == (run_dir / "wandb_id").read_text().strip()
    assert steps_of(records) == [1, 2, 3]
    assert summary_of(records)["mem/predicted_peak_bytes"] == PREDICTED
    assert summary_of(records)["mem/measured_peak_bytes"] == MEASURED
    assert alive(run_dir) == []


@pytest.mark.parametrize("core", [None, "#!/bin/sh\nexit 1\n"], ids=["missing", "broken"])
def test_wandb_without_its_binary_is_one_warning(tmp_path: Path, env: dict[str, str], core: str | None) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    path = wandb_without_core(tmp_path / "path", core)
    check_only_warns(run_dir, track(run_dir, spec, env | {"PYTHONPATH": str(path)}))
    assert "did not end" not in str(record(run_dir).warning)


def test_wandb_missing_is_one_warning(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    path = stub_wandb(tmp_path / "path", "raise ImportError('wandb is not installed')\n")
    warning = track(run_dir, spec, env | {"PYTHONPATH": str(path)})
    check_only_warns(run_dir, warning)
    assert "wandb is not installed" in str(warning)


def check_only_warns(run_dir: Path, warning: str | None) -> None:
    """One warning, and no run."""
    assert warning is not None
    assert "\n" not in warning
    assert str(run_dir / STEPS_FILE) in warning
    assert "tracking=none" in warning
    assert not list(run_dir.glob("wandb/*run-*/*.wandb"))


def test_a_wandb_that_hangs_everywhere_is_stopped_in_time(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir, "tracking.timeout_s=2")
    path = stub_wandb(tmp_path / "path", "import time\ntime.sleep(600)\n")
    began = time.monotonic()
    warning = track(run_dir, spec, env | {"PYTHONPATH": str(path)})
    assert time.monotonic() - began < PROMISE_S
    check_only_warns(run_dir, warning)
    assert alive(run_dir) == []


def test_a_sidecar_that_does_not_end_is_killed_with_all_it_started(
    tmp_path: Path, env: dict[str, str], silent_server: str
) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    tracker = tracking.start(run_dir, 1, spec, with_server(env, silent_server))
    assert tracker is not None
    wait_until(run_dir, lambda: any("wandb-core" in words for words in alive(run_dir)))

    warning = tracker.finish(0.1)

    check_only_warns(run_dir, warning)
    assert "0.1 s" in str(warning)
    wait_until(run_dir, lambda: not alive(run_dir))


def test_a_sidecar_that_cannot_be_started_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    check_only_warns(run_dir, track(run_dir, spec, {}))


def test_the_sidecar_of_a_killed_rank_ends_by_itself_with_all_steps(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    planned(run_dir)
    train_step(run_dir, 1)
    source = (
        "import sys, time; from pathlib import Path; from orchestrator import tracking; "
        "from orchestrator.spec import RunSpec; run_dir = Path(sys.argv[1]); "
        "spec = RunSpec.model_validate_json((run_dir / 'spec.json').read_text()); "
        "tracking.start(run_dir, 1, spec); time.sleep(600)"
    )
    rank = subprocess.Popen([sys.executable, "-c", source, str(run_dir)], env=env, cwd=Path(__file__).parent.parent)
    wait_until(run_dir, lambda: (run_dir / "wandb_id").exists())
    train_step(run_dir, 2)
    rank.send_signal(signal.SIGKILL)
    rank.wait()

    wait_until(run_dir, lambda: tracking.record_file(run_dir, 1).exists())

    assert record(run_dir).warning is None
    assert steps_of(inspect(run_dir)) == [1, 2]
    wait_until(run_dir, lambda: not alive(run_dir))


def wait_until(run_dir: Path, true: Callable[[], bool]) -> None:
    """Poll; fails after the promised time."""
    deadline = time.monotonic() + PROMISE_S
    while not true():
        assert time.monotonic() < deadline, f"not in time; the sidecar printed: {printed(run_dir)}"
        time.sleep(0.05)


def test_the_sidecar_does_not_get_the_variables_of_a_rank(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    spec = planned(run_dir)
    path = stub_wandb(tmp_path / "path", "import os\nraise ImportError(' '.join(sorted(os.environ)))\n")
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    warning = track(run_dir, spec, env | ranks | {"PYTHONPATH": str(path)})
    assert warning is not None
    assert "WANDB_PROJECT" in warning
    assert not [name for name in ranks if name in warning.split()]


def test_a_half_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / STEPS_FILE
    writes = [b'{"a": 1}\n{"b"', b": 2}\n", b'{"half']

    def over(wait_s: float) -> bool:
        with path.open("ab") as file:
            file.write(writes.pop(0))
        return not writes

    assert list(wandb_sidecar.follow_lines(path, over)) == [b'{"a": 1}', b'{"b": 2}']


def test_a_half_line_of_a_killed_writer_is_passed_over(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    train_step(run_dir, 1)
    line = (run_dir / STEPS_FILE).read_bytes()
    assert wandb_sidecar.metrics(line[:20], attempt=1) is None
    assert wandb_sidecar.metrics(line, attempt=2) is None
    assert (wandb_sidecar.metrics(line, attempt=1) or {})["global_step"] == 1


def test_a_rank_that_tracks_imports_no_wandb() -> None:
    source = "import sys; from orchestrator import tracking; sys.exit(bool({'wandb', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", source], cwd=Path(__file__).parent.parent).returncode == 0


def test_a_tag_longer_than_wandb_takes_is_left_out() -> None:
    spec = run_spec("tracking=wandb", f"tracking.tags=[{'x' * 64},{'y' * 65}]")
    assert "x" * 64 in wandb_sidecar.tags(spec)
    assert "y" * 65 not in wandb_sidecar.tags(spec)


def test_an_unknown_peak_is_left_out(tmp_path: Path) -> None:
    planned(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text('{"estimate": {"peak_device_bytes": null}}')
    assert wandb_sidecar.peaks(tmp_path / "run", 1) == {}
    train_end(tmp_path / "run")
    assert wandb_sidecar.peaks(tmp_path / "run", 1) == {"mem/measured_peak_bytes": MEASURED}
