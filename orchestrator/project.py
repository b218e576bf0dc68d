"""Where the project's own files are: the folder that holds conf, orchestrator and train."""

from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parent.parent
CONF_DIR = SOURCE_ROOT / "conf"
