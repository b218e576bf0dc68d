"""Options of the test suite and what all tests share."""

import os

import pytest

# Two workers on two cores: threads that wait for each other would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--renew-golden writes the golden files instead of only comparing with them."""
    parser.addoption("--renew-golden", action="store_true", help="write tests/golden/* anew")
