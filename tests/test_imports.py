"""Who may import whom: one direction, and no torch where an answer is wanted at once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.project import SOURCE_ROOT

WITHOUT_TORCH = ("train.spec", "train.shapes", "train.checks", "train.report", "train.corpus")


def modules(package: str) -> list[str]:
    paths = sorted((SOURCE_ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE_ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_train_never_imports_the_orchestrator() -> None:
    for path in (SOURCE_ROOT / "train").rglob("*.py"):
        assert not [name for name in imported(path) if name.split(".")[0] == "orchestrator"], path


def test_only_config_imports_hydra_and_omegaconf() -> None:
    for path in [*(SOURCE_ROOT / "orchestrator").rglob("*.py"), *(SOURCE_ROOT / "train").rglob("*.py")]:
        found = [name for name in imported(path) if name.split(".")[0] in ("hydra", "omegaconf")]
        assert not found or path.name in ("config.py", "sweep.py"), path


def test_only_the_command_line_imports_itself_and_formulas_know_no_verdict() -> None:
    for path in (SOURCE_ROOT / "orchestrator").rglob("*.py"):
        if path.name != "__main__.py":
            assert "orchestrator.cli" not in imported(path), path
    for path in (SOURCE_ROOT / "orchestrator" / "memory").rglob("*.py"):
        forbidden = {"orchestrator.oomguard", "orchestrator.planner", "orchestrator.launch"}
        assert not forbidden & imported(path), path


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python where importing torch fails."""
    block = "import sys; sys.modules['torch'] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, check=False, cwd=SOURCE_ROOT
    )


def test_the_launcher_imports_without_torch() -> None:
    names = [*modules("orchestrator"), *WITHOUT_TORCH]
    done = run_without_torch("".join(f"import {name}\n" for name in names))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["check"], ["check", "model=llama3_8b", "output=json"], ["runs"], ["--help"]])
def test_check_and_the_run_verbs_work_without_torch(words: list[str]) -> None:
    done = run_without_torch(f"from orchestrator.cli import main; sys.exit(main({words!r}))")
    assert done.returncode in (0, 3), done.stderr
    assert "Traceback" not in done.stderr
