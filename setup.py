"""Packaging of megatron-ext.  Exact versions of everything installed: tools/requirements.lock."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """Version string of the package, read without importing it (importing needs torch)."""
    source = (HERE / "megatron_ext" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise ValueError('megatron_ext/__init__.py has no line of the form __version__ = "1.2.3"')
    return match.group(1)


setup(
    name="megatron-ext",
    version=version(),
    description="Megatron-Core extension for reinforcement-learning post-training",
    packages=find_packages(include=["megatron_ext", "megatron_ext.*"]),
    package_dir={"": "."},
    python_requires=">=3.12",
    install_requires=[
        "megatron-core[training]==0.19.2",
        "torch",
        "transformers",
        "safetensors",
        "gguf",
        "matplotlib",
        "tensorboard",
        "jinja2>=3.1.6",
        "tqdm",
        "math-verify",
        "latex2sympy2-extended",
    ],
    extras_require={
        # Apex, which some fused Megatron kernels want, has no wheels: build it from source as
        # Megatron's installation guide describes.
        "gpu": ["transformer-engine[pytorch]", "flash-attn"],
        # procedural tasks; one of its dependencies is compiled from C on installation
        "tasks": ["reasoning-gym==0.1.25"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "pyright[nodejs]",
        ],
    },
)
