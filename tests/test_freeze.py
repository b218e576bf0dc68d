"""The frozen copy and the patch, of real git repositories and of folders that are none."""

import hashlib
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.errors import NotSubmittedError
from orchestrator.launch.freeze import Frozen, freeze

FORK = multiprocessing.get_context("fork")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Me", "-c", "user.email=me@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A clean project under git."""
    folder = tmp_path / "project"
    for package in ("orchestrator", "train", "conf"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(f'"""{package}"""\n')
    (folder / ".gitignore").write_text("runs/\n*.log\n__pycache__/\n")
    (folder / "conf" / "config.yaml").write_text("a: 1\n")
    (folder / "picture.bin").write_bytes(bytes(range(256)))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder but git's own, with their content."""
    found = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def make_dirty(source: Path) -> None:
    """Every kind of change that git knows."""
    (source / "train" / "__init__.py").write_text("changed = 1\n")
    (source / "picture.bin").write_bytes(bytes(range(255, -1, -1)))
    (source / "conf" / "config.yaml").unlink()
    (source / "orchestrator" / "staged.py").write_text("staged = 1\n")
    git(source, "add", "orchestrator/staged.py")
    (source / "orchestrator" / "staged.py").write_text("staged = 2\n")
    (source / "train" / "untracked ä.py").write_text("untracked = 1\n")
    (source / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    (source / "empty.txt").touch()
    (source / "ignored.log").write_text("not this\n")


def patched(source: Path, frozen: Frozen, where: Path) -> dict[str, bytes]:
    """The files of the recorded commit with the recorded patch applied."""
    git(source, "worktree", "add", "--quiet", "--detach", str(where), str(frozen.commit))
    patch = where.with_suffix(".patch")
    patch.write_text(frozen.patch, encoding="utf-8", errors="surrogateescape")
    git(where, "apply", str(patch))
    return files(where)


def test_the_copy_holds_tracked_and_untracked_files_and_not_the_ignored_ones(source: Path, tmp_path: Path) -> None:
    make_dirty(source)
    frozen = freeze(source, tmp_path / "runs")
    expected = files(source)
    del expected["ignored.log"]
    assert files(frozen.code) == expected
    assert frozen.code.parent == tmp_path / "runs" / ".code"


def test_a_clean_tree_has_a_commit_and_no_patch(source: Path, tmp_path: Path) -> None:
    frozen = freeze(source, tmp_path / "runs")
    assert (frozen.commit, frozen.patch) == (git(source, "rev-parse", "HEAD").strip(), "")


def test_the_patch_makes_the_frozen_tree_of_the_commit(source: Path, tmp_path: Path) -> None:
    make_dirty(source)
    frozen = freeze(source, tmp_path / "runs")
    assert patched(source, frozen, tmp_path / "again") == files(frozen.code)


def test_the_patch_does_not_depend_on_how_the_user_likes_his_diffs(source: Path, tmp_path: Path) -> None:
    make_dirty(source)
    for setting in ("color.ui=always", "diff.noprefix=true", "diff.external=false", "diff.relative=true"):
        git(source, "config", *setting.split("="))
    (source / ".gitattributes").write_text("*.py diff=shout\n")
    git(source, "config", "diff.shout.textconv", "tr a-z A-Z <")
    frozen = freeze(source, tmp_path / "runs")
    assert patched(source, frozen, tmp_path / "again") == files(frozen.code)


def test_freezing_leaves_gits_index_alone(source: Path, tmp_path: Path) -> None:
    make_dirty(source)
    index = source / ".git" / "index"
    before = git(source, "status", "--porcelain"), hashlib.sha256(index.read_bytes()).hexdigest()
    freeze(source, tmp_path / "runs")
    assert hashlib.sha256(index.read_bytes()).hexdigest() == before[1]
    assert git(source, "status", "--porcelain") == before[0]


def test_a_worktree_is_frozen_as_its_repository_is(source: Path, tmp_path: Path) -> None:
    git(source, "worktree", "add", "--quiet", "--detach", str(tmp_path / "worktree"))
    make_dirty(tmp_path / "worktree")
    frozen = freeze(tmp_path / "worktree", tmp_path / "runs")
    assert frozen.commit == git(source, "rev-parse", "HEAD").strip()
    assert patched(source, frozen, tmp_path / "again") == files(frozen.code)


def test_a_project_in_a_subfolder_is_frozen_without_what_lies_around_it(source: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    source.rename(outer / "project")
    (outer / "project" / ".git").rename(tmp_path / "old.git")
    (outer / "letter.txt").write_text("private\n")
    git(outer, "add", ".")
    git(outer, "commit", "--quiet", "-m", "all")
    (outer / "letter.txt").write_text("more private\n")
    (outer / "project" / "new.py").write_text("new = 1\n")
    frozen = freeze(outer / "project", tmp_path / "runs")
    assert set(files(frozen.code)) == set(files(outer / "project"))
    assert "private" not in frozen.patch
    assert "new = 1" in frozen.patch


def test_the_same_content_is_copied_once(source: Path, tmp_path: Path) -> None:
    first = freeze(source, tmp_path / "runs")
    inode = first.code.stat().st_ino
    again = freeze(source, tmp_path / "runs")
    assert (again.code, again.code.stat().st_ino) == (first.code, inode)
    assert [path.name for path in (tmp_path / "runs" / ".code").iterdir()] == [first.code.name]


def test_other_content_and_another_name_have_another_copy(source: Path, tmp_path: Path) -> None:
    copies = {freeze(source, tmp_path / "runs").code}
    (source / "train" / "__init__.py").write_text("changed = 1\n")
    copies.add(freeze(source, tmp_path / "runs").code)
    (source / "train" / "__init__.py").rename(source / "train" / "other.py")
    copies.add(freeze(source, tmp_path / "runs").code)
    assert len(copies) == 3


def test_a_copy_stays_as_it_was_when_the_source_changes(source: Path, tmp_path: Path) -> None:
    frozen = freeze(source, tmp_path / "runs")
    before = files(frozen.code)
    (source / "train" / "__init__.py").write_text("raise SystemExit\n")
    assert files(frozen.code) == before


def test_the_runs_inside_the_project_are_not_part_of_it_though_git_does_not_ignore_them(source: Path) -> None:
    first = freeze(source, source / "experiments")
    (source / "experiments" / "tiny" / "checkpoints").mkdir(parents=True)
    (source / "experiments" / "tiny" / "checkpoints" / "large.bin").write_bytes(b"0" * 4096)
    again = freeze(source, source / "experiments")
    assert (again.code, again.patch) == (first.code, "")
    assert not (again.code / "experiments").exists()


def test_a_nested_repository_and_a_dead_link_do_not_disturb(source: Path, tmp_path: Path) -> None:
    make_dirty(source)
    nested = source / "nested"
    nested.mkdir()
    git(nested, "init", "--quiet")
    (source / "dead").symlink_to("nowhere")
    frozen = freeze(source, tmp_path / "runs")
    assert "untracked = 1" in frozen.patch
    assert not (frozen.code / "dead").exists()


def test_outside_git_the_packages_are_copied_and_the_commit_is_unknown(source: Path, tmp_path: Path) -> None:
    (source / ".git").rename(tmp_path / "old.git")
    (source / "letter.txt").write_text("not a part of the program\n")
    (source / "train" / "__pycache__").mkdir()
    (source / "train" / "__pycache__" / "x.pyc").touch()
    frozen = freeze(source, tmp_path / "runs")
    assert (frozen.commit, frozen.patch) == (None, "")
    packages = ("orchestrator/__init__.py", "train/__init__.py", "conf/__init__.py", "conf/config.yaml")
    assert set(files(frozen.code)) == set(packages)


def test_a_repository_without_a_commit_has_no_patch(source: Path, tmp_path: Path) -> None:
    (source / ".git").rename(tmp_path / "old.git")
    git(source, "init", "--quiet")
    frozen = freeze(source, tmp_path / "runs")
    assert (frozen.commit, frozen.patch) == (None, "")
    assert "train/__init__.py" in files(frozen.code)


def test_without_git_at_hand_the_packages_are_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert freeze(source, tmp_path / "runs").commit is None


def test_launches_at_once_share_one_copy_and_leave_no_half_one(source: Path, tmp_path: Path) -> None:
    workers = [FORK.Process(target=freeze, args=(source, tmp_path / "runs")) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    (only,) = (tmp_path / "runs" / ".code").iterdir()
    assert files(only) == files(source)


def test_a_patch_that_git_cannot_make_is_refused_rather_than_left_out(source: Path, tmp_path: Path) -> None:
    make_dirty(source)
    commit = git(source, "rev-parse", "HEAD^{tree}").strip()
    tree = source / ".git" / "objects" / commit[:2] / commit[2:]
    tree.chmod(0o600)
    os.truncate(tree, 0)
    with pytest.raises(NotSubmittedError, match=r"git cannot tell .* differs from its commit .*See: git -C .* fsck"):
        freeze(source, tmp_path / "runs")


def test_installed_in_somebody_elses_repository_its_commit_and_files_are_left_alone(
    source: Path, tmp_path: Path
) -> None:
    installed = source / "venv" / "site-packages"
    for package in ("orchestrator", "train", "conf"):
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").write_text("installed = 1\n")
    (installed / "another.py").write_text("not ours\n")
    frozen = freeze(installed, tmp_path / "runs")
    assert (frozen.commit, frozen.patch) == (None, "")
    assert set(files(frozen.code)) == {f"{package}/__init__.py" for package in ("orchestrator", "train", "conf")}


def test_a_copy_that_somebody_has_changed_is_made_anew(source: Path, tmp_path: Path) -> None:
    before = freeze(source, tmp_path / "runs").code
    (before / "train" / "__init__.py").unlink()
    (before / "conf" / "config.yaml").write_text("a: 2\n")
    again = freeze(source, tmp_path / "runs").code
    assert again == before
    assert files(again) == files(source)
