"""Cut a text into a part to calibrate on and a part to judge on, between two paragraphs.

python examples/mha2mla_smollm2/split_text.py TEXT CALIBRATION EVALUATION
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Write both parts."""
    source, calibration, evaluation = map(Path, sys.argv[1:])
    text = source.read_text(encoding="utf-8")
    cut = text.find("\n", len(text) // 2) + 1
    if not 0 < cut < len(text):
        sys.exit(f"{source} has no line break in its second half: give a text with paragraphs.")
    calibration.write_text(text[:cut], encoding="utf-8")
    evaluation.write_text(text[cut:], encoding="utf-8")
    print(f"{source.name}: {cut} characters to calibrate on, {len(text) - cut} to judge on")


if __name__ == "__main__":
    main()
