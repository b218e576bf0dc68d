"""Other people's runs: each has a config of ours or a reason, and none that ran is refused."""

import csv
import statistics

import pytest

from tests.bench.public import MAPPING, Mapped, NotMapped, Outcome, mapping, outcome, rows
from train import shapes
from train.checks import problems
from train.spec import TrainSpec

# Parameters as scripts/train/benchmarking/README.md of mosaicml/llm-foundry prints them, by model and sequence length.
_PUBLISHED_PARAMETERS = {
    ("MPT-70b", 2048): 64862437376,
    ("MPT-30b", 2048): 29975214080,
    ("MPT-13b", 8192): 12885411840,
    ("MPT-13b", 512): 12846090240,
    ("MPT-7b", 16384): 6717579264,
    ("MPT-7b", 2048): 6658859008,
    ("MPT-3b", 32768): 2730480640,
    ("MPT-3b", 2048): 2651837440,
}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome(row) for row in rows()]


def test_every_row_has_a_config_or_a_reason(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == 99
    for each in outcomes:
        assert isinstance(each.mapped, Mapped) or each.mapped.reason, f"{each.row.file}:{each.row.line}"


def test_every_config_passes_the_checks_that_the_command_line_makes(outcomes: list[Outcome]) -> None:
    for each in outcomes:
        if isinstance(each.mapped, Mapped):
            sections = {name: getattr(each.mapped.spec, name) for name in TrainSpec.model_fields}
            assert problems(sections) == [], f"{each.row.file}:{each.row.line}"


def test_a_config_has_the_sizes_of_its_row(outcomes: list[Outcome]) -> None:
    for each in outcomes:
        if isinstance(each.mapped, NotMapped):
            continue
        spec, row = each.mapped.spec, each.row
        for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_mlp", "vocab_size"):
            assert getattr(spec.model, name) == int(row[name]), f"{row.file}:{row.line} {name}"
        assert spec.train.micro_batch == int(row["micro_batch"])
        assert spec.train.seq_len == int(row["seq_len"])
        assert spec.parallel.world_size == int(row["num_devices"])


def test_the_configs_of_mpt_have_the_published_numbers_of_parameters() -> None:
    found = {}
    for row in rows():
        mapped = mapping(row)
        if isinstance(mapped, Mapped):
            found[(row["model"], int(row["seq_len"]))] = shapes.num_parameters(mapped.spec.model)
    assert {key: found[key] for key in _PUBLISHED_PARAMETERS} == _PUBLISHED_PARAMETERS


def test_only_three_rows_have_no_config(outcomes: list[Outcome]) -> None:
    reasons = {(each.row.file, each.row.line) for each in outcomes if isinstance(each.mapped, NotMapped)}
    assert reasons == {("public_memory.csv", 12), ("public_memory.csv", 15), ("public_memory.csv", 17)}


def test_the_estimate_knows_every_config(outcomes: list[Outcome]) -> None:
    unknown = {f"{each.row.file}:{each.row.line}": each.unknown for each in outcomes if each.unknown}
    assert unknown == {}


def test_no_run_that_ended_well_is_refused_without_a_margin(outcomes: list[Outcome]) -> None:
    ran = [each for each in outcomes if each.row["outcome"] == "fit" and isinstance(each.mapped, Mapped)]
    assert len(ran) == 96
    assert [f"{each.row.file}:{each.row.line}" for each in ran if each.refused is not False] == []


def test_half_of_the_published_peaks_are_predicted_to_seven_per_cent(outcomes: list[Outcome]) -> None:
    measured = [each for each in outcomes if each.row.measured_bytes is not None and isinstance(each.mapped, Mapped)]
    errors = [abs(each.error) for each in measured if each.error is not None]
    assert len(errors) == len(measured) == 16
    assert statistics.median(errors) <= 0.07


def test_the_record_has_every_row_and_its_config(outcomes: list[Outcome]) -> None:
    """Numbers in the record are renewed by `python -m tests.bench.public`."""
    with MAPPING.open(encoding="utf-8", newline="") as file:
        recorded = {
            (row["file"], int(row["line"])): (row["overrides"], row["not_mapped"]) for row in csv.DictReader(file)
        }
    expected = {}
    for each in outcomes:
        key = (each.row.file, each.row.line)
        mapped = each.mapped
        expected[key] = (" ".join(mapped.overrides), "") if isinstance(mapped, Mapped) else ("", mapped.reason)
    assert recorded == expected
